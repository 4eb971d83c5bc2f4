"""Data-parallel training on STL-10 as tutorials write it: the reference of `make bench-train`.

    torchrun --nproc-per-node 2 benchmarks/plain_ddp.py --data-dir DATA --model resnet18

torchvision's dataset class, PIL transforms for one image at a time, DistributedSampler, DataLoader with two workers,
DistributedDataParallel with its defaults, `loss.item()` in each step. Rank 0 prints the steady state of each epoch:
images/s of all ranks, without the epoch's first steps (DataLoader's workers start again in each epoch).
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

OWN_SIZE = 96  # pixels of STL-10's images


class STL10(torchvision.datasets.STL10):
    """Accepts files of the right format whatever they contain: the benchmark's files are not the real ones."""

    def _check_integrity(self) -> bool:
        return True


def make_loader(args: argparse.Namespace) -> "DataLoader[tuple[Tensor, Tensor]]":
    resize = [] if args.image_size == OWN_SIZE else [transforms.Resize(args.image_size)]
    transform = transforms.Compose(
        [
            *resize,
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
        ]
    )
    dataset = STL10(args.data_dir, split="train", transform=transform)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(dataset)
    batch_size = args.batch_size // dist.get_world_size()
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=args.workers, pin_memory=True)


def train(args: argparse.Namespace) -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    loader = make_loader(args)
    model = torchvision.models.get_model(args.model, num_classes=10).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        model.train()
        running_loss, begun = 0.0, time.time()
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if step == args.skip:
                begun = time.time()
        if dist.get_rank() == 0:
            rate = (step - args.skip) * args.batch_size / (time.time() - begun)
            print(f"epoch {epoch + 1}: loss {running_loss / step:.3f}, {rate:.2f} images/s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--skip", type=int, default=2, help="first steps of each epoch that are not counted")
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
