"""The C of CUDA kernels as Python: each kernel a generator function that yields at barriers.

What is understood is the C that small kernels are written in, without types of their own, and
without changes of variables inside of expressions; all else is refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["NotUnderstood", "translated"]


class NotUnderstood(Exception):
    """A text is not of the C that is understood, or does what no kernel may."""


def translated(text: str, functions: Collection[str]) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The source in Python, and of each kernel the types of its parameters, such as `float *`.

    Kernels are called `k_` and their name there, and take what a thread knows of itself, and their
    parameters. The functions that are given are called `c_` and their name.

    Args:
        text: the source in C.
        functions: those that there are in Python, by their names in C; those of float, `floorf`,
            are found without their last letter.

    Raises:
        NotUnderstood: see there.
    """
    parser = _Parser(_tokens(text), functions)
    return "\n".join(parser.functions()), parser.kernels


_BUILT_IN = ("threadIdx", "blockIdx", "blockDim", "gridDim")

_INTEGERS = frozenset(("int", "long", "unsigned", "short", "char", "size_t", "bool", "signed"))
_REALS = frozenset(("float", "double", "half", "__half"))
_QUALIFIERS = frozenset(
    (
        *("const", "static", "inline", "volatile", "extern", '"C"', "__restrict__", "__restrict"),
        *("__global__", "__device__", "__forceinline__", "__inline__"),
    )
)
_TYPES = _INTEGERS | _REALS | {"void"}
_SPELLED = _TYPES | {"*"}

_NUMBER = r"\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|0[xX][\da-fA-F]+|\d+"
_SIGN = r"<<=|>>=|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|[-+*/%<>=!&|^~?:;,.(){}\[\]]"
_TOKEN = re.compile(rf'\s*(?:("C")|({_NUMBER})([fFuUlL]*)|([A-Za-z_]\w*)|({_SIGN}))')


@dataclass(frozen=True)
class _Macro:
    """A definition: parameters are None where it takes none."""

    parameters: list[str] | None
    body: list[str]


def _tokens(text: str) -> list[str]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).replace("\\\n", " ")
    defined: dict[str, _Macro] = {}
    lines = []
    for line in text.split("\n"):
        if not line.lstrip().startswith("#"):
            lines.append(line)
        elif found := re.match(r"\s*#\s*define\s+(\w+)(?:\(([\w\s,]*)\))?\s+(\S.*)", line):
            given = None if found[2] is None else [name.strip() for name in found[2].split(",")]
            defined[found[1]] = _Macro(given, list(_lexed(found[3])))
        elif not re.match(r"\s*#\s*(include|pragma\s+unroll|define\s+\w+\s*$)", line):
            raise NotUnderstood(f"`{line.strip()}` is not understood")
    return [*_expanded(list(_lexed("\n".join(lines))), defined, 8), "end of the text"]


def _expanded(tokens: list[str], defined: Mapping[str, _Macro], most: int) -> list[str]:
    """Tokens with the definitions in their places, and those in these, up to a depth."""
    found: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        macro = defined.get(token)
        if macro is None or not most:
            found.append(token)
            continue
        body = macro.body
        if macro.parameters is not None:
            given, at = _given(tokens, at)
            if len(given) != len(macro.parameters):
                raise NotUnderstood(f"`{token}` with {len(given)} arguments is not understood")
            values = dict(zip(macro.parameters, given, strict=True))
            body = [t for token in body for t in values.get(token, [token])]
        found += _expanded(body, defined, most - 1)
    return found


def _given(tokens: list[str], at: int) -> tuple[list[list[str]], int]:
    """The arguments in parentheses from a place on, and the place behind these."""
    given: list[list[str]] = [[]]
    depth = 0
    for place in range(at, len(tokens)):
        token = tokens[place]
        depth += (token == "(") - (token == ")")
        if not depth:
            return given, place + 1
        if token == "," and depth == 1:
            given.append([])
        elif depth > 1 or token != "(":
            given[-1].append(token)
    raise NotUnderstood("a parenthesis stays open")


def _lexed(text: str) -> Iterator[str]:
    at, text = 0, text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotUnderstood(f"`{text[at : at + 20].strip()}` is not understood")
        at = found.end()
        number = found[2]
        if number and "f" in found[3].lower() and number.isdigit():
            number += ".0"
        yield found[1] or number or found[4] or found[5]


class _Parser:
    """C to Python, by recursive descent. Each variable has a name of its own in Python."""

    def __init__(self, tokens: Sequence[str], functions: Collection[str]) -> None:
        self._tokens, self._at = tokens, 0
        self._functions = functions
        self._last = ("", "")
        self._scopes: list[dict[str, tuple[str, str]]] = []
        self._steps: list[list[str]] = []
        self._count = 0
        self._code: list[str] = []
        self._depth = 0
        self._devices: set[str] = set()
        self.kernels: dict[str, tuple[str, ...]] = {}

    def functions(self) -> list[str]:
        while self._next() != "end of the text":
            self._function()
        return self._code

    def _function(self) -> None:
        kernel, start = False, self._at
        while self._next() in _QUALIFIERS or self._next() in _TYPES or self._next() == "*":
            kernel |= self._take() == "__global__"
        if self._next() == "__launch_bounds__":
            while self._take() != ")":
                pass
        name = self._name()
        if self._at == start + 1:
            self._refuse(name)
        self._scopes.append({})
        self._need("(")
        taken, kinds = [], []
        while not self._has(")"):
            begin = self._at
            kind = self._kind()
            kinds.append(" ".join(t for t in self._tokens[begin : self._at] if t in _SPELLED))
            taken.append(self._declare(self._name(), kind))
            self._has(",")
        if kernel:
            self.kernels[name] = tuple(kinds)
            self._line(f"def k_{name}({', '.join(['_own', *taken])}):")
        else:
            self._devices.add(name)
            self._line(f"def d_{name}({', '.join(taken)}):")
        self._depth += 1
        self._need("{")
        self._block()
        if kernel:
            self._line("return")
            self._line("yield")
        self._depth -= 1
        self._scopes.pop()

    # Tokens.

    def _next(self, ahead: int = 0) -> str:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _take(self) -> str:
        token = self._next()
        if self._at >= len(self._tokens):
            self._refuse(token)
        self._at += 1
        return token

    def _has(self, token: str) -> bool:
        found = self._next() == token
        self._at += found
        return found

    def _need(self, token: str) -> None:
        if not self._has(token):
            self._refuse(self._next())

    def _name(self) -> str:
        token = self._take()
        if not token.isidentifier():
            self._refuse(token)
        return token

    def _refuse(self, token: str) -> NoReturn:
        near = " ".join(self._tokens[max(self._at - 6, 0) : self._at + 3])
        raise NotUnderstood(f"`{token}` near `{near}` is not understood")

    def _line(self, code: str) -> None:
        self._code.append("    " * self._depth + code)

    # Names and types.

    def _kind(self) -> str:
        """A type: `int`, `float`, or one of these with a star."""
        words = []
        while self._next() in _QUALIFIERS | _TYPES:
            words.append(self._take())
        if not _TYPES & {*words}:
            self._refuse(self._next())
        kind = "float" if _REALS & {*words} else "int"
        while self._next() == "*" or self._next() in _QUALIFIERS:
            kind += "*" if self._take() == "*" else ""
        return kind

    def _declare(self, name: str, kind: str) -> str:
        self._count += 1
        own = f"{name}_{self._count}"
        self._scopes[-1][name] = (own, kind)
        return own

    def _known(self, name: str) -> tuple[str, str]:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return self._refuse(name)

    # Statements.

    def _block(self) -> None:
        self._scopes.append({})
        while not self._has("}"):
            self._statement()
        self._scopes.pop()

    def _body(self) -> None:
        self._depth += 1
        self._line("pass")
        self._scopes.append({})
        self._statement()
        self._scopes.pop()
        self._depth -= 1

    def _statement(self) -> None:
        token = self._next()
        if self._has(";"):
            return
        if self._has("{"):
            self._block()
        elif self._has("if"):
            self._line(f"if {self._condition()}:")
            self._body()
            if self._has("else"):
                self._line("else:")
                self._body()
        elif self._has("for"):
            self._for()
        elif self._has("while"):
            self._line(f"while {self._condition()}:")
            self._steps.append([])
            self._body()
            self._steps.pop()
        elif self._has("return"):
            value = "" if self._next() == ";" else self._expression()
            self._line(f"return {value}".rstrip())
            self._need(";")
        elif self._has("continue"):
            for step in self._steps[-1]:
                self._line(step)
            self._line("continue")
            self._need(";")
        elif self._has("break"):
            self._line("break")
            self._need(";")
        elif token in _TYPES or token in _QUALIFIERS or token == "__shared__":
            self._declaration()
            self._need(";")
        elif token == "__syncthreads":
            for expected in ("__syncthreads", "(", ")", ";"):
                self._need(expected)
            self._line("yield")
        else:
            for step in self._changes(";"):
                self._line(step)

    def _condition(self) -> str:
        self._need("(")
        found = self._expression()
        self._need(")")
        return found

    def _for(self) -> None:
        self._need("(")
        self._scopes.append({})
        if not self._has(";"):
            if self._next() in _TYPES | _QUALIFIERS:
                self._declaration()
                self._need(";")
            else:
                for step in self._changes(";"):
                    self._line(step)
        condition = "True" if self._next() == ";" else self._expression()
        self._need(";")
        steps = [] if self._has(")") else self._changes(")")
        self._line(f"while {condition}:")
        self._steps.append(steps)
        self._body()
        self._steps.pop()
        self._depth += 1
        for step in steps:
            self._line(step)
        self._depth -= 1
        self._scopes.pop()

    def _declaration(self) -> None:
        shared = unsized = False
        while self._next() in ("extern", "__shared__"):
            shared |= self._take() == "__shared__"
        kind = self._kind()
        while self._next() == "__shared__":
            shared |= self._take() == "__shared__"
        while True:
            name = self._name()
            value = "None"
            if self._has("["):
                unsized = self._next() == "]"
                size = "None" if unsized else self._expression()
                self._need("]")
                zero = "0.0" if kind == "float" else "0"
                own = self._declare(name, f"{kind}*")
                value = f"c__list({size}, {zero})"
                if shared:
                    value = f"_own.shared({own!r}, {size}, {zero})"
                elif unsized:
                    self._refuse(name)
                self._line(f"{own} = {value}")
            else:
                if self._has("="):
                    value = self._cast(kind, self._expression())
                self._line(f"{self._declare(name, kind)} = {value}")
            if not self._has(","):
                return
            while self._has("*"):
                kind += "*"

    def _changes(self, end: str) -> list[str]:
        """Assignments and calls up to a token, which is taken."""
        found = [self._change()]
        while not self._has(end):
            self._need(",")
            found.append(self._change())
        return found

    def _change(self) -> str:
        before = self._has("++") - self._has("--")
        target, kind = self._unary()
        operator = self._next()
        if before or operator in ("++", "--"):
            by = before or (1 if self._take() == "++" else -1)
            return f"{target} += {by}"
        if operator == "=" or (operator[-1:] == "=" and operator not in ("==", "!=", "<=", ">=")):
            self._take()
            value = self._expression()
            if operator != "=":
                value = self._of_two(operator[:-1], target, value)
            return f"{target} = {self._cast(kind, value)}"
        return target

    # Expressions, and the types of what can be written to.

    def _cast(self, kind: str, value: str) -> str:
        return f"{kind}({value})" if kind in ("int", "float") else value

    def _expression(self) -> str:
        condition = self._operation(0)
        if not self._has("?"):
            return condition
        one = self._expression()
        self._need(":")
        return f"({one} if {condition} else {self._expression()})"

    def _operation(self, level: int) -> str:
        if level == len(_LEVELS):
            return self._unary()[0]
        found = self._operation(level + 1)
        while self._next() in _LEVELS[level]:
            operator = self._take()
            found = self._of_two(operator, found, self._operation(level + 1))
        return found

    def _of_two(self, operator: str, one: str, two: str) -> str:
        if operator in ("/", "%"):
            return f"{'c__divided' if operator == '/' else 'c__remainder'}({one}, {two})"
        word = {"&&": "and", "||": "or"}.get(operator, operator)
        return f"({one} {word} {two})"

    def _unary(self) -> tuple[str, str]:
        if self._has("-"):
            return f"(-{self._unary()[0]})", ""
        if self._has("+"):
            return self._unary()[0], ""
        if self._has("!"):
            return f"(not {self._unary()[0]})", ""
        if self._has("~"):
            return f"(~{self._unary()[0]})", ""
        if self._has("*"):
            found, kind = self._unary()
            return f"{found}[0]", kind[:-1]
        if self._has("&"):
            found, kind = self._unary()
            if not found.endswith("]"):
                self._refuse("&")
            array, index = self._last
            return f"({array} + {index})", f"{kind}*"
        if self._next() == "(" and self._next(1) in _TYPES | {"const"}:
            self._take()
            kind = self._kind()
            self._need(")")
            return self._cast(kind, self._unary()[0]), kind
        return self._postfix()

    def _postfix(self) -> tuple[str, str]:
        token = self._take()
        kind = ""
        if token == "(":
            found = f"({self._expression()})"
            self._need(")")
        elif token[0].isdigit() or token[0] == ".":
            return token, ""
        elif token in ("true", "false"):
            return token.capitalize(), ""
        elif token in _BUILT_IN:
            self._need(".")
            return f"_own.{token}.{self._name()}", ""
        elif self._next() == "(":
            found = self._call(token)
        elif token.isidentifier():
            found, kind = self._known(token)
        else:
            self._refuse(token)
        while self._has("["):
            index = self._expression()
            self._need("]")
            self._last = (found, index)
            found, kind = f"{found}[{index}]", kind[:-1]
        return found, kind

    def _call(self, name: str) -> str:
        self._need("(")
        given = []
        while not self._has(")"):
            given.append(self._expression())
            if self._next() != ")":
                self._need(",")
        if name in self._devices:
            return f"d_{name}({', '.join(given)})"
        elif name not in self._functions:
            name = name.removesuffix("f")
            if name not in self._functions:
                self._refuse(name)
        return f"c_{name}({', '.join(given)})"


_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
