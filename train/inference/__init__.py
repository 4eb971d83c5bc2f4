"""What is done with trained weights: `python -m train export` and `python -m train predict`.

May import: datasets, checkpoints, model, start and all below. `recipe` says what a checkpoint keeps of its data
(config["data"]): the session writes it, weights reads it. export writes .pt, .safetensors and .json files.
"""
