"""--freeze: parameters that stay as they are, named by patterns."""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import filter as matching
from functools import cache

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.settings import SettingsError


def freeze(network: nn.Module, patterns: str) -> None:
    """Freezes the parameters of these names (fnmatch's patterns, with commas between), in place, before a strategy
    wraps the network.

    Batch normalisation whose parameters are all frozen keeps its statistics as well: it computes as in evaluation.
    Raises SettingsError where a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(network.named_parameters())
    for pattern in filter(None, (each.strip() for each in patterns.split(","))):
        found = matching(parameters, pattern)
        if not found:
            raise SettingsError(f"--freeze {pattern}: no parameter has such a name{near(pattern, network)}")
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise SettingsError(f"--freeze {patterns}: nothing is left to train")
    for module in network.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(each.requires_grad for each in own):
            module.__class__ = held(type(module))  # type: ignore[arg-type, assignment]  # mypy: a class has no __hash__
            module.eval()


def near(pattern: str, network: nn.Module) -> str:
    """Near patterns: parameters, and all parameters of a module."""
    known = list(patterns_for(network))
    plain = pattern.removesuffix("*").removesuffix(".")
    close = [f"{plain}.*"] if f"{plain}.*" in known else get_close_matches(pattern, known)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known[:8])} and others"


def patterns_for(network: nn.Module) -> Iterator[str]:
    for name, module in network.named_modules():
        if name and next(module.parameters(), None) is not None:
            yield f"{name}.*"
    yield from (name for name, _ in network.named_parameters())


@cache
def held(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` that stays in evaluation; names of modules and parameters stay as they are."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        return kind.train(self, False)

    return type(f"Frozen{kind.__name__}", (kind,), {"train": train, "__module__": kind.__module__})


def trained(network: nn.Module) -> str:
    """ "2 of 62 parameters are trained (5,130 of 11,181,642 values)" """
    parameters = list(network.parameters())
    free = [parameter for parameter in parameters if parameter.requires_grad]
    values = [sum(parameter.numel() for parameter in some) for some in (free, parameters)]
    return f"{len(free)} of {len(parameters)} parameters are trained ({values[0]:,} of {values[1]:,} values)"
