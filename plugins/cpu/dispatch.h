// Which instruction set the kernels use: the best one this machine has, unless $EDGEKV_ISA or edgekv_set_isa says otherwise.
#pragma once
#include "cpu/kernels.h"

namespace edgekv {

// Name of the i-th instruction set this machine can run, best last ("scalar" is always first); null past the end.
const char* isa_name(int i);

// The kernels in use. An unknown $EDGEKV_ISA is ignored here; set_isa reports it.
const Kernels& kernels();

// Chooses by name. Returns 0, or 1 with a sentence when this machine cannot run it. Not while a step is running.
int set_isa(const char* name);

}  // namespace edgekv
