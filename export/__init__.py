"""From a Hugging Face causal language model to a bundle; runs on a workstation and needs the extra `edgekv[export]`."""
