"""Programs compiled for GPUs that are not there, and what can be read from them."""
