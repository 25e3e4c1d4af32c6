// Stands for CUDA's header of this name when the TensorRT plugin is built for the emulation: TensorRT's headers want the types.
#pragma once
#include "../cuda_emulation.h"

using cudaEvent_t = void*;
