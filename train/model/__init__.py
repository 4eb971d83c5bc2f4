"""The network itself: built by name, prepared for its device, its precision, averages of its weights (ema), the
statistics of batch normalisation that differ from rank to rank, and tensors of which each rank has a piece.

May import: settings, names, own_parts, generators, whole_files, torch_versions. Writes no document, except
`torchvision_cpu --install`, which puts a hook into site-packages.
"""
