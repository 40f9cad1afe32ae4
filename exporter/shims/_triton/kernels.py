"""What Triton's stand-in is made of: kernels that torch computes, and placeholders."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fuseport.exporter.shims import SHIMS, _placeholder, used_again
from fuseport.exporter.shims._overlay import OVERLAID
from fuseport.exporter.shims._triton.host import ANSWERS, Compiled
from fuseport.exporter.shims._triton.launch import launched
from fuseport.exporter.shims._triton.programs import Unknown
from fuseport.exporter.shims._triton.rewriting import layers

__all__ = ["Config", "JITFunction", "Placeholder", "autotune", "heuristics", "jit"]


class JITFunction:
    """A kernel: `kernel[grid](…)` computes by torch what it stores.

    Args:
        fn: the function that was decorated, or the kernel.
        configs: of `autotune`, the first of which is taken; those of the kernel by default.
        heuristics: what gives constants of the kernel, by name, of all arguments by name; those of
            the kernel besides.
    """

    def __init__(
        self,
        fn: Any,
        configs: Sequence["Config"] | None = None,
        heuristics: Mapping[str, Callable[[dict[str, Any]], Any]] | None = None,
    ) -> None:
        inner = fn if isinstance(fn, JITFunction) else None
        self.fn: Any = fn if inner is None else inner.fn
        kept: Sequence[Config] = inner.configs if inner else ()
        self.configs: list[Config] = list(kept if configs is None else configs)
        self.values: dict[str, Any] = {**(inner.values if inner else {}), **(heuristics or {})}
        self.is_installed = False
        self.__name__: str = getattr(self.fn, "__name__", "kernel")
        self.__doc__ = self.fn.__doc__
        code = getattr(self.fn, "__code__", None)
        self.arg_names = list(code.co_varnames[: code.co_argcount]) if code else []

    @classmethod
    def of(cls, kernel: Any) -> "JITFunction":
        """A kernel of Triton itself, with what is wrapped around it."""
        *wrapped, function = layers(kernel)
        configs = next((each.configs for each in wrapped if hasattr(each, "configs")), None)
        values: dict[str, Any] = {}
        for each in reversed(wrapped):
            values.update(getattr(each, "values", {}))
        made = cls(function, configs, values)
        made.is_installed = True
        return made

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self.run, grid=grid)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the Triton kernel {self.__name__} is called without a grid")

    def run(
        self,
        *args: Any,
        grid: Any,
        warmup: bool = False,
        compiled: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes what a launch stores.

        Args:
            args, kwargs: of the kernel.
            grid: how many programs there are.
            warmup: whether it is only compiled.
            compiled: arguments that it was compiled for, beside those that are given.

        Raises:
            RuntimeError: it has no form in torch.
        """
        if warmup:
            return Compiled(self.run, kwargs)
        there = {*self.arg_names[: len(args)], *kwargs}
        kwargs |= {name: v for name, v in (compiled or {}).items() if name not in there}
        if not self.is_installed:
            used_again("triton")
        kwargs = {**kwargs, **self.best_config.kwargs}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        for name, value in self.values.items():
            kwargs[name] = given[name] = value(given)
        if prepare := self.best_config.pre_hook:  # it may zero what is added to
            prepare({**given, **kwargs})
        try:
            launched(self.fn, grid, args, kwargs)
        except Unknown as error:
            self._refuse(error)

    @property
    def best_config(self) -> "Config":
        """Of `autotune`, the one that is taken."""
        return self.configs[0] if self.configs else Config({})

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> Compiled:
        """Says what a compiled kernel takes of a device, as nothing is compiled."""
        return Compiled(self.run, kwargs)

    def _refuse(self, reason: Exception) -> NoReturn:
        if function := _overlaid_caller():
            raise NotImplementedError(
                f"{function} launched the Triton kernel {self.__name__}, which runs on GPUs only; "
                f"fuseport has no form of this function, and of the kernel none in torch: {reason}"
            ) from reason
        code = getattr(self.fn, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        known = [name for name in SHIMS if code and name in Path(code.co_filename).parts]
        instead = "".join(f", or have a stand-in for all of it: --shim {name}" for name in known)
        raise RuntimeError(
            f"the Triton kernel {self.__name__}{place} was launched, which runs on GPUs only, and "
            f"fuseport finds no form of it in torch: {reason}. Take the path of the model without "
            "Triton, if it has one, or call the op of fuseport.ops that computes the same"
            f"{instead}"
        ) from reason


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


def _asked_by_overlaid() -> bool:
    """Whether it is an overlaid package that asks a placeholder, for its own way without a GPU."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")) == __name__:
        frame = frame.f_back
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in OVERLAID


class Config:
    """Settings of a kernel for `autotune`, kept as given.

    Args:
        kwargs: values of the kernel's constants.
        options: num_warps, num_stages and the like.
    """

    def __init__(self, kwargs: dict[str, Any], *args: Any, **options: Any) -> None:
        self.kwargs = kwargs
        self.pre_hook: Any = None
        self.__dict__.update(options)
        names = ("num_warps", "num_stages", "num_ctas")
        self.__dict__.update(zip(names, args, strict=False))


def jit(fn: Any = None, **options: Any) -> Any:
    """Decorates a kernel, with or without options."""
    return JITFunction if fn is None else JITFunction(fn)


def autotune(configs: Sequence[Config] = (), *args: Any, **options: Any) -> Any:
    """Decorates a kernel, which keeps the configs."""
    return partial(JITFunction, configs=configs)


def heuristics(values: Mapping[str, Any]) -> Any:
    """Decorates a kernel, which keeps what gives its constants."""
    return partial(JITFunction, heuristics=values)


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


class _Constant:
    """What code around kernels asks of a constant of theirs, which is a number besides."""

    @property
    def value(self) -> Any:
        """The number, as Python's own."""
        return type(self).__bases__[1](self)


_KINDS: Mapping[type, Any] = {
    kind: type(f"constexpr[{kind.__name__}]", (_Constant, kind), {}) for kind in (int, float, str)
}


def _constant(value: Any) -> Any:
    kind = _KINDS.get(int if type(value) is bool else type(value))
    return value if kind is None else kind(value)


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
            return _constant(args[0])
        _, driver, question = self._name.partition(".runtime.driver.")
        if driver and question in ANSWERS and not _asked_by_overlaid():
            return ANSWERS[question](*args, **kwargs)
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return JITFunction(args[0])  # a decorator
        raise RuntimeError(
            f"{self._name} was called, but Triton here is fuseport's stand-in: it runs on GPUs "
            "only, and no exported format holds a Triton kernel"
        )
