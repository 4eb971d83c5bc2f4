"""A training as the tutorials write it: torchrun, DistributedSampler, DataLoader, DistributedDataParallel. Nothing of
Muster's is in it, and Muster runs it as it is:

    make train NODES=2 WORKLOAD=examples SCRIPT=plain_ddp.py ARGS="--epochs 5"
    .venv/bin/torchrun --nproc-per-node 2 examples/plain_ddp.py     # without Muster, on one machine

It writes model.pt into the run's folder; without Muster, into the present one.

The same training as three functions, which the trainer then resumes, evaluates, checkpoints and forecasts:
examples/own_parts/parts.py.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: "DataLoader[tuple[Tensor, ...]]", device: torch.device) -> float:
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=60, help="of each rank")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    training, held_out = make_datasets()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, options.batch_size, sampler=sampler)
    test_loader = DataLoader(held_out, options.batch_size, sampler=DistributedSampler(held_out, shuffle=False))

    model = make_model().to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy:.2%}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(os.environ.get("MUSTER_RUN_DIR", "."), "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
