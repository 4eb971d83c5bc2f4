"""What runs on every rank: the trainer (`python -m train`) and the wrapper around torchrun that starts ranks
(`train.start.agent`).

Read first: trainer.py (the loop), step.py (one optimizer step), run.py (from the settings to the exit status). The
rooms, from the bottom up; tests/test_rooms.py holds this order:

    settings, order, whole_files         flags; which sample goes where; files that are whole or absent
    torch_versions                       what is called otherwise in another release of torch
    start, model, losses, optim          how ranks come to life; the network; loss and optimizer
    datasets, checkpoints, parallel      batches; saved states; DDP and the other ways
    inference, evaluate, step            export and predict; the held-out part; one optimizer step
    session                              all of it put together
    resume                               what of it is in a checkpoint, and how a run goes on from one
    reporting                            metrics, progress, picture, result.json
    trainer, forecast                    the loop; measurements for `make check`
    run, then __main__                   one rank from its settings to its exit status; the command line

Imports neither `launch` nor Ansible: it takes all that it needs from torchrun's environment and its own command line.
"""
