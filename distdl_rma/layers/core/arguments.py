"""Arguments of layers, read as torch reads them, and callbacks of their users."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from operator import index as as_int
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, ConfigurationError, ProtocolError, UnsupportedError

T = TypeVar("T")


class Callbacks(TypedDict, total=False):
    """Callbacks that may be given to a layer's constructor; each replaces the layer's own method.

    Interface document, sections 3.1 and 4.1; requirements A9 to A13.
    """

    get_ranks_synch_weights: Callable[[], Sequence[int]]
    get_sizeof_gradients: Callable[[], int]
    get_ranks_synch_norm: Callable[[], Sequence[int]]
    get_sizeof_norm: Callable[[], int]
    get_sizeof_tensor: Callable[[], int]
    get_sizeof_input_tensor: Callable[[], int]
    get_sizeof_output_tensor: Callable[[], int]


class LayerOptions(Callbacks, total=False):
    """Keyword arguments of every layer: its name in messages, and callbacks."""

    name: str | None


class PlacedOptions(LayerOptions, total=False):
    """Keyword-only arguments of layers with parameters, beside those of torch."""

    placement: str | None
    weights: str | None


CALLBACKS = frozenset(Callbacks.__annotations__)


class CallbackModule(nn.Module):
    """A module with all callbacks but that for weights; callbacks of its user are attributes."""

    # Bytes of this rank's input and output: of the last call, or as announced before the first.
    shard_nbytes: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Name for messages."""
        raise NotImplementedError

    def get_sizeof_gradients(self) -> int:
        """Bytes of all parameter gradients of this layer on this rank."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share statistics with this one, itself included; empty if none is needed."""
        return []

    def get_sizeof_norm(self) -> int:
        """Bytes of one message of statistics; 0 without any."""
        return 0

    def get_sizeof_input_tensor(self) -> int:
        """Bytes of this rank's shard of the input of the last call; 0 on idle ranks.

        ``ProtocolError`` before the first call, unless the layer was built from global parameters.
        """
        return self._known_nbytes()[0]

    def get_sizeof_output_tensor(self) -> int:
        """Bytes of this rank's shard of the output; otherwise as ``get_sizeof_input_tensor``."""
        return self._known_nbytes()[1]

    def get_sizeof_tensor(self) -> int:
        """Bytes of this rank's shard if the output is as large as the input, else a ``ProtocolError``."""
        before, after = self._known_nbytes()
        if before != after:
            raise ProtocolError(
                f"{self.label!r}: takes {before} bytes and returns {after}: ask for get_sizeof_input_tensor()"
                " or get_sizeof_output_tensor()"
            )
        return before

    def _known_nbytes(self) -> tuple[int, int]:
        if self.shard_nbytes is None:
            raise ProtocolError(f"{self.label!r}: sizes of its tensors are not known before the first call")
        return self.shard_nbytes

    def check_callbacks(self, who: str, names: Sequence[str], **sizes: int) -> None:
        """Raise ``ConfigurationError`` if a user's callback and the module, or a size, differ."""
        for name in (*names, *sizes):
            if name not in vars(self):
                continue
            try:
                given = _plain(vars(self)[name]())
                true = sizes[name] if name in sizes else _plain(getattr(type(self), name)(self))
            except Exception as error:
                raise ConfigurationError(f"{who}: {name}() gives no such thing: {error!r}") from error
            if given != true:
                raise ConfigurationError(
                    f"{who}: {name}() gave {given}, it is {true}; leave it out, or correct it"
                )


def set_callbacks(module: nn.Module, who: str, callbacks: Mapping[str, Any]) -> None:
    """Replace methods of a module by the given callbacks; local."""
    for name, callback in callbacks.items():
        if name not in CALLBACKS:
            raise TypeError(f"{who} got an unexpected keyword argument {name!r}")
        if not callable(callback):
            raise ConfigurationError(f"{who}: {name} is a function without arguments, got {callback!r}")
        setattr(module, name, callback)


def _plain(result: Any) -> int | list[int]:
    return as_int(result) if hasattr(result, "__index__") else sorted(as_int(rank) for rank in result)


def each_dim(
    kind: str, what: str, value: object, dims: int, read: Callable[[Any], T], wanted: str
) -> tuple[T, ...]:
    """One value per dimension from an argument of torch: one for all, or a sequence of ``dims``.

    ``ArgumentError`` if the sequence has another length, or ``read`` raises ``TypeError`` or ``ValueError``.
    """
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims
    try:
        if len(values) == dims:
            return tuple(read(v) for v in values)
    except (TypeError, ValueError):
        pass
    raise ArgumentError(f"{kind}: {what} is {wanted}, or {dims} of them; got {value!r}")


def per_dim(kind: str, what: str, value: object, dims: int, least: int) -> tuple[int, ...]:
    """One integer of at least ``least`` per dimension; as in torch, a sequence of one is valid too."""

    def read(number: Any) -> int:
        found = as_int(number)
        if found < least:
            raise ValueError
        return found

    given = tuple(value) * dims if isinstance(value, Sequence) and len(value) == 1 else value
    return each_dim(kind, what, given, dims, read, f"an integer of at least {least}")


def chosen_placement(kind: str, placement: str | None, weights: str | None, allowed: Sequence[str]) -> str:
    """Placement of a layer's parameters: one of ``allowed``, by default the first.

    ``weights`` is another name of ``placement``. ``ArgumentError`` if the two differ, or are not allowed.
    """
    if placement is not None and weights is not None and placement != weights:
        raise ArgumentError(
            f"{kind}: placement={placement!r} and weights={weights!r} mean the same; give one"
        )
    chosen = next((word for word in (placement, weights) if word is not None), allowed[0])
    if chosen not in allowed:
        raise ArgumentError(f"{kind}: placement is one of {tuple(allowed)}, got {chosen!r}")
    return chosen


def check_device(kind: str, device: torch.device | str | None) -> None:
    """Raise ``UnsupportedError`` if a device is not the CPU; None is torch's default device."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type != "cpu":
        raise UnsupportedError(f"{kind}: device {found} is not supported, only the CPU is")


def show_arguments_of(layer: type[nn.Module], twin: type[nn.Module], named: Iterable[str]) -> None:
    """Give a constructor a signature for ``help``: P_x, the arguments of a torch layer, and keyword ones."""
    constructor, kinds = layer.__init__, inspect.Parameter
    first = [kinds(key, kinds.POSITIONAL_OR_KEYWORD) for key in ("self", "P_x")]
    torchs = inspect.signature(twin).parameters.values()
    last = [kinds(key, kinds.KEYWORD_ONLY, default=None) for key in named]

    @wraps(constructor)
    def shown(self: nn.Module, *arguments: Any, **options: Any) -> None:
        constructor(self, *arguments, **options)

    vars(shown)["__signature__"] = inspect.Signature([*first, *torchs, *last])
    type.__setattr__(layer, "__init__", shown)
