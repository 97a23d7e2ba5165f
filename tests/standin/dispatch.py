"""What becomes of every operation: on the host, on the device, or between the two."""

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
from standin.tensors import GpuTensor, copied, poison, tensors_in, unwrapped, wrapped

aten = torch.ops.aten
_PINNED = "pinned_by_torch"
_KERNELS = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OnGpu(TorchDispatchMode):
    """Sends every operation of this thread to where its tensors are."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch turns its compiler off and on around each operation

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
        if func in CPU_ONLY or not known(func):
            raise NotImplementedError(
                f"Could not run '{func}' with arguments from the 'CUDA' backend."
            )
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        return self._launch(func, tensors, args, kwargs)

    def _on_host(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if self.machine.pinned and not is_view(func):
            written = {id(x) for x in mutated(func, args, kwargs)}
            uses = [(*at, id(x) in written) for x in tensors if (at := self.machine.registered(x))]
            if uses:
                self.machine.step(self.machine.host, str(func), uses)
        return func(*args, **kwargs)

    def _launch(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        machine = self.machine
        if is_view(func):
            first, out = tensors[0], func(*unwrapped(args), **unwrapped(kwargs))
            with torch.inference_mode(first.is_inference()):  # a view of a lasting tensor is one
                return wrapped(out, first.block)
        if waits(func, args):
            machine.wait(machine.current, str(func))
        inner_args, inner_kwargs = unwrapped(args), unwrapped(kwargs)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = "cpu"
        written = mutated(func, args, kwargs)
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
        """Run a collective on NCCL's stream, behind the current one.

        The current one waits for it at once, unless the call is asynchronous.
        """
        machine, names = self.machine, [each.name for each in func._schema.arguments]
        accesses: list[Use] = [
            (x.block, region_of(x), True) for x in tensors_in(args) if isinstance(x, GpuTensor)
        ]
        here, machine.current = machine.current, machine.nccl
        machine.nccl.after(here.mark())
        inner, named = unwrapped(args), unwrapped(kwargs)
        try:
            if machine.capture is not None:
                machine.capture.add(
                    str(func), accesses, lambda: func(*inner, **named)[-1].wait(), (), {}, True
                )
                # the ranks do meet, over what is thrown away
                *_, work = func(*copied(inner), **named)
            else:
                *_, work = machine.run(str(func), accesses, lambda: func(*inner, **named))
        finally:
            machine.current = here
        if not {**dict(zip(names, args, strict=False)), **kwargs}.get("async_op", True):
            here.after(machine.nccl.mark())
        return args[0], work

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy between the host and the device, or within the device."""
        machine = self.machine
        if func is aten.copy_.default:
            to, source, later = (
                args[0],
                args[1],
                args[2] if len(args) > 2 else kwargs.get("non_blocking", False),
            )
        else:
            source, later, device = args[0], kwargs.get("non_blocking", False), kwargs.get("device")
            on_gpu = isinstance(source, GpuTensor) if device is None else self._is_gpu(device)
            layout = kwargs.get("memory_format") or torch.preserve_format
            made = torch.empty_like(
                unwrapped(source), dtype=kwargs.get("dtype"), memory_format=layout
            )
            to = self._new(made, func) if on_gpu else made
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
            elif at := machine.registered(x):
                accesses.append((*at, write))
            elif not hasattr(x, _PINNED):
                pinned = False
        machine.refuse(what)
        machine.run(what, accesses, lambda: unwrapped(to).copy_(unwrapped(source)))
        if not (later and pinned):
            machine.wait(machine.current, what)
        return to

    def _pin(self, func: Any, x: Tensor) -> Any:
        """Pin memory, or tell whether it is; it lives until the copies from it are done."""
        if func is aten.is_pinned.default:
            return hasattr(x, _PINNED) or self.machine.registered(x) is not None
        pinned = x.clone()
        setattr(pinned, _PINNED, True)
        return pinned

    def _is_gpu(self, device: Any) -> bool:
        return device is not None and self.machine.here(device)

    def _new(self, out: Any, func: Any) -> Any:
        """Give results memory of their own."""
        if isinstance(out, Tensor):
            return GpuTensor(
                out,
                Allocation(
                    self.machine, ceil_div(max(1, out.nbytes), 512) * 512, f"the result of {func}"
                ),
            )
        if isinstance(out, tuple | list):
            return type(out)(self._new(each, func) for each in out)
        return out


@cache
def is_composite(func: Any) -> bool:
    """Tell whether an operation is made of others, which then come here one by one."""
    return (
        func not in KERNELS
        and func.namespace == "aten"
        and func.has_kernel_for_dispatch_key(_COMPOSITE)
    )


@cache
def known(func: Any) -> bool:
    """Tell whether a GPU can do this, as far as this build of torch knows.

    A build for CUDA knows, also where there is no GPU.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        torch.version.cuda is None
        or func.namespace != "aten"
        or any(has(func.name(), key) for key in _KERNELS)
    )


@cache
def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that are written to."""
    places = written_places(func)
    if not places:
        return []
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    return [x for value in values for x in tensors_in(value)]


@cache
def written_places(func: Any) -> list[tuple[int, str]]:
    """Return number and name of the arguments that an operation writes to."""
    return [
        (at, each.name)
        for at, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def waits(func: Any, args: Any) -> bool:
    indexes = (
        args[1]
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
        else ()
    )
    return func in WAITING or any(x is not None and x.dtype == torch.bool for x in indexes)
