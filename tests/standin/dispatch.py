"""The dispatch of every operation: on the host, on the device, or between the two."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.layout import ceil_div
from standin.clocks import region_of
from standin.kernels import CPU_ONLY, KERNELS, UNSET, WAITING
from standin.machine import Allocation, Machine, Use
from standin.tensors import GpuTensor, clone, poison, tensors_in, unwrap, wrap

aten = torch.ops.aten
_PINNED = "pinned_by_torch"
_KERNELS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OnGpu(TorchDispatchMode):
    """A mode that runs every operation of this thread on the device of its tensors."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch disables its compiler around each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return self._pin(func, args[0])
        tensors = tensors_in((args, kwargs))
        device = kwargs.get("device")
        gpus = [x for x in tensors if isinstance(x, GpuTensor)]
        if func in (aten.copy_.default, aten._to_copy.default) and (gpus or self._is_gpu(device)):
            return self._copy(func, args, kwargs)
        if not gpus and not self._is_gpu(device):
            return self._on_host(func, tensors, args, kwargs)
        for x in tensors:
            if not isinstance(x, GpuTensor) and x.dim():
                raise RuntimeError(
                    f"{func}: Expected all tensors to be on the same device, found {x.device} and "
                    "a GPU"
                )
        if device is not None and not self._is_gpu(device):
            raise RuntimeError(f"{func}: from a GPU to {device}")
        if func in CPU_ONLY or not is_supported(func):
            raise NotImplementedError(
                f"Could not run '{func}' with arguments from the 'CUDA' backend."
            )
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        return self._launch(func, tensors, args, kwargs)

    def _on_host(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if self.machine.pinned and not is_view(func):
            written = {id(x) for x in mutated_args(func, args, kwargs)}
            uses = [
                (*place, id(x) in written)
                for x in tensors
                if (place := self.machine.find_registered(x))
            ]
            if uses:
                self.machine.step(self.machine.host, str(func), uses)
        return func(*args, **kwargs)

    def _launch(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        machine = self.machine
        if is_view(func):
            first, out = tensors[0], func(*unwrap(args), **unwrap(kwargs))
            with torch.inference_mode(
                first.is_inference()
            ):  # a view of a normal tensor is a normal tensor
                return wrap(out, first.block)
        if synchronizes(func, args):
            machine.wait(machine.current, str(func))
        inner_args, inner_kwargs = unwrap(args), unwrap(kwargs)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = "cpu"
        written = mutated_args(func, args, kwargs)
        targets = {id(x) for x in written}
        accesses: list[Use] = [
            (x.block, region_of(x), id(x) in targets) for x in tensors if isinstance(x, GpuTensor)
        ]
        kernel = KERNELS.get(func, func)
        if machine.capture is not None:
            out = machine.capture.add(
                str(func), accesses, kernel, inner_args, inner_kwargs, bool(written)
            )
        else:
            out = machine.run(str(func), accesses, lambda: kernel(*inner_args, **inner_kwargs))
        if written:
            return written[0] if isinstance(out, Tensor) else (*written,)
        if func in UNSET:
            poison(out, integer=None if machine.capture is None else 0)
        return self._new(out, func)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective on NCCL's stream, after the current one.

        The current stream waits for it immediately, unless the call is asynchronous.
        """
        machine, names = self.machine, [argument.name for argument in func._schema.arguments]
        accesses: list[Use] = [
            (x.block, region_of(x), True) for x in tensors_in(args) if isinstance(x, GpuTensor)
        ]
        stream, machine.current = machine.current, machine.nccl
        machine.nccl.wait_for(stream.mark())
        inner, named = unwrap(args), unwrap(kwargs)
        try:
            if machine.capture is not None:
                machine.capture.add(
                    str(func), accesses, lambda: func(*inner, **named)[-1].wait(), (), {}, True
                )
                # the ranks synchronize, on copies that are discarded
                *_, work = func(*clone(inner), **named)
            else:
                *_, work = machine.run(str(func), accesses, lambda: func(*inner, **named))
        finally:
            machine.current = stream
        if not {**dict(zip(names, args, strict=False)), **kwargs}.get("async_op", True):
            stream.wait_for(machine.nccl.mark())
        return args[0], work

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy between the host and the device, or within the device."""
        machine = self.machine
        if func is aten.copy_.default:
            to, source = args[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source = args[0]
            non_blocking, device = kwargs.get("non_blocking", False), kwargs.get("device")
            on_gpu = isinstance(source, GpuTensor) if device is None else self._is_gpu(device)
            layout = kwargs.get("memory_format") or torch.preserve_format
            empty = torch.empty_like(
                unwrap(source), dtype=kwargs.get("dtype"), memory_format=layout
            )
            to = self._new(empty, func) if on_gpu else empty
            if non_blocking and not on_gpu:
                return self._copy_later(source, to)
        what = f"{func} from {source.device.type} to {to.device.type}"
        if isinstance(to, GpuTensor) and isinstance(source, GpuTensor):
            accesses = [(to.block, region_of(to), True), (source.block, region_of(source), False)]
            if machine.capture is not None:
                machine.capture.add(
                    what, accesses, Tensor.copy_, (to.inner, source.inner), {}, True
                )
            else:
                machine.run(what, accesses, lambda: to.inner.copy_(source.inner))
            return to
        accesses, pinned = [], True
        for x, write in ((to, True), (source, False)):
            if isinstance(x, GpuTensor):
                accesses.append((x.block, region_of(x), write))
            elif place := machine.find_registered(x):
                accesses.append((*place, write))
            elif not hasattr(x, _PINNED):
                pinned = False
        machine.check_not_capturing(what)
        machine.run(what, accesses, lambda: unwrap(to).copy_(unwrap(source)))
        if not (non_blocking and pinned):
            machine.wait(machine.current, what)
        return to

    def _copy_later(self, source: Tensor, to: Tensor) -> Tensor:
        """Copy to memory that torch pins for it: unset until the host has waited for the stream."""
        machine, what = self.machine, "copy to pinned memory"
        machine.check_not_capturing(what)
        value = to.clone()
        reads: list[Use] = [(source.block, region_of(source), False)]
        machine.run(what, reads, lambda: value.copy_(unwrap(source)))
        poison(to)
        machine.arrivals.append((machine.current, machine.current.steps, value, to))
        return to

    def _pin(self, func: Any, x: Tensor) -> Any:
        """Pin memory, or return whether it is pinned; it is freed after the copies from it."""
        if func is aten.is_pinned.default:
            return hasattr(x, _PINNED) or self.machine.find_registered(x) is not None
        pinned = x.clone()
        setattr(pinned, _PINNED, True)
        return pinned

    def _is_gpu(self, device: Any) -> bool:
        return device is not None and self.machine.is_this_gpu(device)

    def _new(self, out: Any, func: Any) -> Any:
        """Allocate device memory for results."""
        if isinstance(out, Tensor):
            return GpuTensor(
                out,
                Allocation(
                    self.machine, ceil_div(max(1, out.nbytes), 512) * 512, f"the result of {func}"
                ),
            )
        if isinstance(out, tuple | list):
            return type(out)(self._new(x, func) for x in out)
        return out


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operation decomposes into others, which are dispatched one by one."""
    return (
        func not in KERNELS
        and func.namespace == "aten"
        and func.has_kernel_for_dispatch_key(_COMPOSITE)
    )


@cache
def is_supported(func: Any) -> bool:
    """Return whether a GPU supports an operation, as far as this build of torch knows.

    A CUDA build knows it even without a GPU.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        torch.version.cuda is None
        or func in KERNELS
        or func.namespace != "aten"
        or any(has(func.name(), key) for key in _KERNELS)
    )


@cache
def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def mutated_args(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to."""
    positions = written_positions(func)
    if not positions:
        return []
    values = [args[index] if index < len(args) else kwargs.get(name) for index, name in positions]
    return [x for value in values for x in tensors_in(value)]


@cache
def written_positions(func: Any) -> list[tuple[int, str]]:
    """Return index and name of the arguments that an operation writes to."""
    return [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def synchronizes(func: Any, args: Any) -> bool:
    indexes = (
        args[1]
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
        else ()
    )
    return func in WAITING or any(x is not None and x.dtype == torch.bool for x in indexes)
