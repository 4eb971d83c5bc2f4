"""Data-parallel training as tutorials write it: the reference of `make bench-train`.

    torchrun --nproc-per-node 2 benchmarks/plain_ddp.py --data-dir DATA --model resnet18

torchvision's dataset class (STL-10's files, or with --imagefolder JPEGs), PIL transforms for one image at a time,
DistributedSampler, DataLoader, DistributedDataParallel with its defaults, `loss.item()` in each step. Workers, if there
are any, stay from epoch to epoch. Rank 0 prints the steady state of each epoch: images/s of all ranks, without the
epoch's first steps.

--tuned: as whoever looks for speed on CPU cores would write it next: a fused optimizer, gradients that lie in DDP's
buckets, no buffers sent around, no `loss.item()`. (Memory that is kept is two variables of glibc: benchmarks/train.py.)
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms

OWN_SIZE = 96  # pixels of STL-10's images
Samples = Dataset[tuple[Tensor, int]]


class STL10(torchvision.datasets.STL10):
    """Accepts files of the right format whatever they contain: the benchmark's files are not the real ones."""

    def _check_integrity(self) -> bool:
        return True


def stl10(args: argparse.Namespace) -> Samples:
    resize = [] if args.image_size == OWN_SIZE else [transforms.Resize(args.image_size)]
    transform = transforms.Compose(
        [
            *resize,
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
        ]
    )
    return STL10(args.data_dir, split="train", transform=transform)


def imagefolder(args: argparse.Namespace) -> Samples:
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return torchvision.datasets.ImageFolder(os.path.join(args.data_dir, "train"), transform)


def train(args: argparse.Namespace) -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dataset = imagefolder(args) if args.imagefolder else stl10(args)
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        args.batch_size // dist.get_world_size(),
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=device.type == "cuda",
    )
    model = torchvision.models.get_model(args.model, num_classes=10).to(device)
    device_ids = [local_rank] if device.type == "cuda" else None
    if args.tuned:
        model = DistributedDataParallel(model, device_ids, broadcast_buffers=False, gradient_as_bucket_view=True)
    else:
        model = DistributedDataParallel(model, device_ids)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True if args.tuned else None
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        running_loss, begun = torch.zeros((), device=device), time.time()
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.detach() if args.tuned else loss.item()
            if step == args.skip:
                begun = time.time()
        if dist.get_rank() == 0:
            rate = (step - args.skip) * args.batch_size / (time.time() - begun)
            print(f"epoch {epoch + 1}: loss {running_loss.item() / step:.3f}, {rate:.2f} images/s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--imagefolder", action="store_true", help="DATA/train holds a folder of images for each class")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--skip", type=int, default=2, help="first steps of each epoch that are not counted")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tuned", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
