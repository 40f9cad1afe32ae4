"""What Triton's stand-in is made of: kernels that cannot be launched, and placeholders."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fuseport.exporter.shims import SHIMS, _placeholder
from fuseport.exporter.shims._overlay import OVERLAID

__all__ = ["Config", "JITFunction", "Placeholder", "autotune", "heuristics", "jit"]


class JITFunction:
    """A kernel: `kernel[grid](…)` raises RuntimeError and says so.

    Args:
        fn: the function that was decorated, or the kernel.
        configs: of `autotune`; those of the kernel by default.
    """

    def __init__(self, fn: Any, configs: Sequence["Config"] | None = None) -> None:
        self.fn: Any = fn.fn if isinstance(fn, JITFunction) else fn
        inherited: Sequence[Config] = fn.configs if isinstance(fn, JITFunction) else ()
        self.configs: list[Config] = list(inherited if configs is None else configs)
        self.__name__: str = getattr(self.fn, "__name__", "kernel")
        self.__doc__ = self.fn.__doc__
        code = getattr(self.fn, "__code__", None)
        self.arg_names = list(code.co_varnames[: code.co_argcount]) if code else []

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self._refuse

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses, as a launch does."""
        self._refuse()

    def warmup(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses, as a launch does."""
        self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        if function := _overlaid_caller():
            raise NotImplementedError(
                f"{function} launched the Triton kernel {self.__name__}, which runs on GPUs only "
                "and is in no exported format; fuseport has no form of this function"
            )
        code = getattr(self.fn, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        known = [name for name in SHIMS if code and name in Path(code.co_filename).parts]
        instead = "".join(f", or have a stand-in for all of it: --shim {name}" for name in known)
        raise RuntimeError(
            f"the Triton kernel {self.__name__}{place} was launched, but Triton here is fuseport's "
            "stand-in: Triton kernels run on GPUs only, and no exported format holds one. Take the "
            "path of the model without Triton, if it has one, or call the op of fuseport.ops that "
            f"computes the same{instead}"
        )


def _overlaid_caller() -> str | None:
    """The function of an overlaid package that the package's other code, or the user's, called."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        package, _, part = module.partition(".")
        if package in OVERLAID and part.partition(".")[0] in ("ops", "modules") and name[0] != "<":
            found = f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return found


class Config:
    """Settings of a kernel for `autotune`, kept as given.

    Args:
        kwargs: values of the kernel's constants.
        options: num_warps, num_stages and the like.
    """

    def __init__(self, kwargs: dict[str, Any], *args: Any, **options: Any) -> None:
        self.kwargs = kwargs
        self.__dict__.update(options)
        names = ("num_warps", "num_stages", "num_ctas")
        self.__dict__.update(zip(names, args, strict=False))


def jit(fn: Any = None, **options: Any) -> Any:
    """Decorates a kernel, with or without options."""
    return JITFunction if fn is None else JITFunction(fn)


def autotune(configs: Sequence[Config] = (), *args: Any, **options: Any) -> Any:
    """Decorates a kernel, which keeps the configs."""
    return partial(JITFunction, configs=configs)


def heuristics(*args: Any, **options: Any) -> Any:
    """Decorates a kernel."""
    return JITFunction


class Autotuner(JITFunction):
    """What classes derive from that keep the configs of kernels; it takes what Triton's takes."""

    def __init__(
        self,
        fn: Any,
        arg_names: Sequence[str] = (),
        configs: Sequence[Config] = (),
        key: Sequence[str] = (),
        reset_to_zero: Sequence[str] | None = None,
        restore_value: Sequence[str] | None = None,
        pre_hook: Any = None,
        post_hook: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(fn, configs)
        self.arg_names = list(arg_names) or self.arg_names
        self.keys = list(key)
        self.reset_to_zero = list(reset_to_zero or ())
        self.restore_value = list(restore_value or ())
        self.pre_hook, self.post_hook = pre_hook, post_hook
        self.user_defined_pre_hook = pre_hook is not None
        self.user_defined_post_hook = post_hook is not None
        self.cache: dict[Any, Config] = {}


class _Base:
    """What classes derive from where they derive from any other class of Triton's."""


class Placeholder(_placeholder.Placeholder):
    """Something of triton's that code may name, annotate with, decorate by, derive from and look
    into."""

    def __getitem__(self, item: Any) -> "Placeholder":
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        known = {"Autotuner": Autotuner, "JITFunction": JITFunction}
        return (known.get(self._name.rpartition(".")[2], _Base),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name.endswith(".constexpr"):
            return args[0]  # a constant, as kernels and the code around them use it
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return JITFunction(args[0])  # a decorator
        raise RuntimeError(
            f"{self._name} was called, but Triton here is fuseport's stand-in: it runs on GPUs "
            "only, and no exported format holds a Triton kernel"
        )
