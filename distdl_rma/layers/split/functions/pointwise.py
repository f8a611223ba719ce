"""Functions of single elements, also of lists of tensors: every rank computes its block.

These are most calls of a program, so the usual one costs little: ``pointwise`` walks over the arguments once,
and if all split tensors have one layout and nothing else is a tensor, it calls torch's function on blocks and
is done. All else (other layouts, broadcasting, plain tensors, keywords) goes to ``_of_several``, which
chooses the common layout and moves the smaller operands.

    x + y, one layout       torch.add(block of x, block of y)
    x + bias, plain         bias is cut to this rank's part, where it has the extent of x
    x + y, other layouts    y moves to the layout of x, if x has more elements
    b += x, b plain         b becomes split, as the same object; a buffer stays plain and needs all of x

In place means in the block's memory: the block is in the graph, and counts its changes, as torch needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch

from distdl_rma.layers.split.calls.signatures import mapped
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule, raise_as_torch
from distdl_rma.layers.split.operands import (
    as_blocks,
    as_whole,
    block_of,
    common_layout,
    composition,
    everywhere_of,
    of_cut,
    part_for,
    site_for,
)
from distdl_rma.layers.split.tensor import SplitTensor, become_split, checked_block, composed, refused
from distdl_rma.layers.split.views import (
    begin_change,
    end_change,
    fills_memory,
    in_memory,
    order_kept,
    seen_of,
    strides_of,
)

_UNARY = """
abs absolute neg negative sign sgn signbit exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan arcsinh
arccosh arctanh sinc erf erfc erfinv lgamma digamma mvlgamma polygamma logit sigmoid expit ceil floor
round trunc fix frac deg2rad rad2deg i0 isnan isinf isfinite isposinf isneginf isreal logical_not
bitwise_not nan_to_num angle conj_physical clone zeros_like ones_like full_like empty_like float double half
bfloat16 int long short char byte bool type cfloat cdouble zero fill __neg__ __abs__ __invert__ relu relu6
elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh hardsigmoid hardswish hardshrink
softshrink leaky_relu logsigmoid threshold clamp clip clamp_min clamp_max log_ndtr ndtr ndtri entr erfcx
bessel_j0 i0e i1 i1e cpu cuda xpu
""".split()
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum
minimum fmax fmin atan2 arctan2 hypot logaddexp logaddexp2 copysign nextafter ldexp heaviside xlogy
xlog1py lerp addcmul addcdiv masked_fill eq ne lt le gt ge greater greater_equal less less_equal
not_equal isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
bitwise_right_shift rsub complex polar gcd lcm __eq__ __ne__ __lt__ __le__ __gt__ __ge__ _prelu_kernel
""".split()
_OPERATORS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split()
_BINARY += [f"__{side}{name}__" for side in ("", "r", "i") for name in _OPERATORS]


def _in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    return (
        (name.startswith("__i") and name != "__invert__")
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )


@rule(
    "pointwise",
    *_UNARY,
    *_BINARY,
    *(f"{name}_" for name in (*_UNARY, *_BINARY) if not name.endswith("_")),
    *("copy_", "detach_"),
)
def pointwise(  # noqa: C901 - runs for every function of elements
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Each rank computes its block from the blocks of the operands."""
    # A plain number in a tensor without dimensions broadcasts to any block, if it needs no gradient and is
    # not what the function changes.
    layout, blocks = None, list[Any]()
    for argument in args:
        if isinstance(argument, SplitTensor):
            if layout is None:
                layout = argument._layout
            elif argument._layout is not layout:
                return _of_several(func, args, kwargs)
            argument = checked_block(argument)
        elif isinstance(argument, torch.Tensor) and (argument.dim() or argument.requires_grad or not blocks):
            return _of_several(func, args, kwargs)
        blocks.append(argument)
    if layout is None or (kwargs and any(isinstance(x, torch.Tensor) for x in kwargs.values())):
        return _of_several(func, args, kwargs)
    y = func(*blocks, **kwargs)
    if y is blocks[0]:
        return _changed(func, args[0]) if _in_place(func, kwargs) else args[0]
    if not isinstance(y, torch.Tensor):
        if isinstance(y, str) or y is NotImplemented:
            return y
        raise refused(func, "what it returns has another shape on each rank")
    found = SplitTensor(y, layout)
    if args[0].__class__ is SplitTensor and args[0]._strides is not None:
        # Torch keeps the order in memory of the first operand.
        found._strides = order_kept(args[0])
    return found


@rule(
    "pointwise",
    *"detach real imag conj resolve_conj resolve_neg positive __pos__".split(),
    *(torch.Tensor.real.__get__, torch.Tensor.imag.__get__),  # type: ignore[attr-defined]
)
def viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank views its block as torch views the whole tensor."""
    (x,) = args
    y = func(local := checked_block(x), **kwargs)
    if y is local:
        return x
    return seen_of(x, y, x._layout, strides_of(x, func) if y.dtype != local.dtype else x._strides)


@rule("pointwise", torch.Tensor.contiguous)
def contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself where torch returns that; else each rank copies its block."""
    (x,), form = args, kwargs.get("memory_format", torch.contiguous_format)
    y = func(local := checked_block(x), memory_format=form)
    if form is torch.contiguous_format:
        filled = x._strides is None and fills_memory(x)
    elif x._strides is None and not fills_memory(x):
        filled = fills_memory(x, form)
    else:
        # A block with extents of 1 may fill memory in several orders, of which the whole tensor has one.
        filled = in_memory(x).is_contiguous(memory_format=form)
    if filled and y is local:
        return x
    found = SplitTensor(local.clone(memory_format=form) if y is local else y, x._layout)
    if form is not torch.contiguous_format:
        found._strides = strides_of(x, partial(torch.clone, memory_format=form))
    return found


def _changed(func: Any, x: SplitTensor) -> SplitTensor:
    begin_change(func, x)
    return end_change(x)


def _of_several(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = {key: value for key, value in kwargs.items() if value is not None or key != "out"}
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    in_place = _in_place(func, kwargs)
    first = args[0]
    if in_place and not isinstance(first, SplitTensor):
        if without_gradient(*operands):
            return changed_plain(func, args, kwargs)
        become_split(func, first, part_for(first.shape, common_layout(func, operands)))
    result = common_layout(func, [first] if in_place else operands)
    if in_place or result.leaves_out:
        raise_as_torch(func, args, kwargs)
    site = site_for(func, *operands)
    blocks, options = as_blocks(site, (args, kwargs), result, 1)
    y = func(*blocks, **options)
    if isinstance(first, SplitTensor) and y is first._local:
        return _changed(func, first) if in_place else first
    return SplitTensor(y, result)


def without_gradient(*operands: Any) -> bool:
    """Whether a function of these records no graph."""
    return not (
        torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in operands)
    )


def changed_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change a plain tensor, such as a buffer, by whole split ones without a gradient; it stays plain."""
    numbers = count(1)

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, SplitTensor):
            return x
        return everywhere_of(site_for(func, x), x, f"operand {next(numbers)} on a plain tensor")

    operands, options = mapped(whole, (args, kwargs))
    return func(*operands, **options)


@rule("pointwise", "to", "type_as")
def retyped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank converts its block; of another tensor only the type is used."""
    x, *others = args
    others, kwargs = [*map(block_of, others)], {key: block_of(each) for key, each in kwargs.items()}
    if not isinstance(x, SplitTensor):
        return func(x, *others, **kwargs)
    y = func(local := checked_block(x), *others, **kwargs)
    if y is local:
        return x
    if y.is_meta:
        raise refused(func, "a block on the device meta has no memory, which ranks could exchange")
    found = SplitTensor(y, x._layout)
    found._strides = order_kept(x)
    return found


@checked_rule("pointwise", "prelu")
@composition
def prelu(x: Any, weight: Any) -> Any:
    """Each rank computes its block, with the weights of its channels."""
    # One weight per channel, or one for all elements.
    channels, dims = weight.numel(), x.dim()
    shape = (channels, *(1,) * (dims - 2)) if channels != 1 else (1,) * min(dims, 1)
    return torch._prelu_kernel(x, torch.reshape(weight, shape))


@checked_rule("pointwise", "bucketize", "isin")
@of_cut(uncut=True)
def compared(call: Call, site: Site, x: SplitTensor, **given: Any) -> Any:
    """Each rank computes its block; every rank gets all boundaries or test elements."""
    others = given.pop("boundaries" if call[0] is torch.bucketize else "test_elements")
    options = {key: each for key, each in given.items() if each is not None}
    if isinstance(others, SplitTensor):
        others = as_whole(site, others, x._layout, "what is compared with")
    return SplitTensor(call[0](checked_block(x), others, **options), x._layout)


_OF_EACH = "_foreach_"
_NAMES = dir(torch._C._VariableFunctions)
_FUSED = "sgd_", "adam_", "adamw_", "adagrad_"


def _of_products(name: str) -> Callable[..., Any]:
    def function(x: Any, first: Any, second: Any, value: Any = 1, *, scalars: Any = None) -> Any:
        value = value if scalars is None else scalars
        return getattr(x, name)(first, second, value=value)

    return function


# Functions of lists whose function of one tensor has another name or other arguments.
_OTHERWISE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    **{name: _of_products(name) for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")},
    **{name: lambda x, other: x.clamp(min=other) for name in ("maximum", "clamp_min")},
    **{name: lambda x, other: x.clamp(max=other) for name in ("minimum", "clamp_max")},
    **{name: lambda x, other: x.clamp_(min=other) for name in ("maximum_", "clamp_min_")},
    **{name: lambda x, other: x.clamp_(max=other) for name in ("minimum_", "clamp_max_")},
}


@rule("pointwise", *(name for name in _NAMES if name.startswith(_OF_EACH)))
def of_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each tensor of a list, split or plain, follows the rule of the function of one tensor."""
    # Torch's optimizers call these to have few kernels, which blocks on a CPU do not need.
    name = func.__name__.removeprefix(_OF_EACH)
    in_place = name.endswith("_")
    function = _OTHERWISE.get(name) or getattr(torch.Tensor if in_place else torch, name, None)
    if function is None:
        raise refused(func, "there is no such function of one tensor")
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]

    def call(at: int) -> Any:
        given = [each[at] if isinstance(each, (list, tuple)) else each for each in args]
        named = {key: each[at] if isinstance(each, (list, tuple)) else each for key, each in kwargs.items()}
        return composed(function, *given, **named)

    found = tuple(call(at) for at in range(len(lists[0])))
    return [*lists[0]] if in_place else found


@rule("pointwise", *(name for name in _NAMES if name.startswith("_fused_") and name.endswith(_FUSED)))
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step of an optimizer: each rank updates its blocks of parameters, gradients and states."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple)) and each]
    for together in zip(*lists, strict=True):
        layouts = {x._layout for x in together if isinstance(x, SplitTensor)}
        plain = [x for x in together if not isinstance(x, SplitTensor) and x.dim()]
        if len(layouts) > 1 or (layouts and plain):
            raise refused(func, "a parameter, its gradient and its state are not cut alike")
    func(*mapped(block_of, args), **mapped(block_of, kwargs))
