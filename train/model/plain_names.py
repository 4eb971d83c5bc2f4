"""Names of parameters and buffers as the bare torchvision model has them."""

# What torch.compile and activation checkpointing put into names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


def plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
