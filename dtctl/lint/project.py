"""Files and the local files that they import."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from dtctl.lint import names
from dtctl.lint.ranks import guards
from dtctl.lint.source import decoded, read
from dtctl.lint.source_file import Function, SourceFile

MAX_FILES = 40
"""Local files that are looked at for one file."""


class Project:
    """Modules by path; each file is read and parsed once."""

    def __init__(self) -> None:
        self._modules: dict[str, SourceFile | None] = {}
        self._collective: dict[SourceFile, dict[str, str]] = {}
        self._reach: dict[SourceFile, tuple[SourceFile, ...]] = {}
        self._entries: dict[str, frozenset[str]] = {}
        self._files: dict[tuple[str, str, int], tuple[str, ...]] = {}

    def add(self, module: SourceFile) -> None:
        """Remember a module that was read already."""
        self._modules[str(module.path)] = module

    def module(self, path: str) -> SourceFile | None:
        """The module in a file; None when it cannot be read or parsed."""
        if path not in self._modules:
            try:
                text = decoded(read(Path(path)), python=True).text
                self._modules[path] = SourceFile(Path(path), text, ast.parse(text))
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._modules[path] = None
        return self._modules[path]

    def reach(self, module: SourceFile) -> tuple[SourceFile, ...]:
        """A module and the local ones that it imports, directly or over others."""
        cached = self._reach.get(module)
        if cached is None:
            reached, queue = {str(module.path): module}, [module]
            while queue and len(reached) < MAX_FILES:
                for path in self.imported(queue.pop(0)):
                    below = self.module(path) if path not in reached else None
                    if below is not None:
                        reached[path] = below
                        queue.append(below)
            cached = self._reach[module] = tuple(reached.values())
        return cached

    def calls(self, module: SourceFile, name: str) -> bool:
        """Whether the resolved name is called in a module or in what it imports."""
        return any(source.calls.get(name) for source in self.reach(module))

    def methods(self, module: SourceFile, name: str) -> bool:
        """Whether anything whose last part is `name` is called in a module or in what it imports."""
        return any(source.methods.get(name) for source in self.reach(module))

    def trains(self, module: SourceFile) -> bool:
        """Whether a module, with what it imports, is a distributed training."""
        return module.trains or any(source.trains for source in self.reach(module))

    def framework(self, module: SourceFile) -> bool:
        """Whether a framework does the distribution: samplers, devices and saving are its part."""
        return any(
            name.partition(".")[0] in _FRAMEWORKS
            for source in self.reach(module)[:4]
            for name, dots in source.imports
            if not dots
        )

    def collective(self, module: SourceFile) -> dict[str, str]:
        """Functions of a module in which every rank has to take part: name -> the collective they call."""
        cached = self._collective.get(module)
        if cached is None:
            cached = self._collective[module] = {}
            for name in names.COLLECTIVES:
                for call in module.calls.get(name, ()):
                    function = module.scope(call)
                    if isinstance(function, Function) and not _conditional(module, call, function):
                        cached.setdefault(function.name, name.rpartition(".")[2])
            queue = list(cached)
            while queue:
                below = queue.pop()
                for call in module.methods.get(below, ()) if len(module.functions[below]) == 1 else ():
                    caller = module.scope(call)
                    if not isinstance(call.func, ast.Name) or not isinstance(caller, Function):
                        continue
                    if caller.name not in cached and not _conditional(module, call, caller):
                        cached[caller.name] = cached[below]
                        queue.append(caller.name)
        return cached

    def collective_called(self, module: SourceFile, call: ast.Call) -> str | None:
        """The collective that a call of a function of one's own makes; None if it makes none, or is not known."""
        if isinstance(call.func, ast.Name):
            if call.func.id in module.functions:
                return self.collective(module).get(call.func.id)
            qualified = module.aliases.get(call.func.id, "")
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            if call.func.value.id == "self":
                own_class = module.enclosing(call, (ast.ClassDef,))
                definitions = module.functions.get(call.func.attr, [])
                defined_here = any(
                    module.enclosing(definition, (ast.ClassDef,)) is own_class for definition in definitions
                )
                return self.collective(module).get(call.func.attr) if defined_here else None
            qualified = module.aliases.get(call.func.value.id, "") + "." + call.func.attr
        else:
            return None
        if not qualified or qualified.startswith("torch."):
            return None
        owner, _, name = qualified.rpartition(".")
        for path in self.files(module.path, owner.lstrip("."), len(owner) - len(owner.lstrip("."))):
            other = self.module(path)
            if other is not None:
                return self.collective(other).get(name)
        return None

    def imported(self, module: SourceFile) -> list[str]:
        """Local files that a module imports."""
        return [
            path
            for name, dots in module.imports
            if dots or name.partition(".")[0] not in _ELSEWHERE
            for path in self.files(module.path, name, dots)
        ]

    def files(self, path: Path, name: str, dots: int) -> tuple[str, ...]:
        """The file of a module imported from `path`: beside it or, as packages are, further up; empty without one."""
        folder = os.path.dirname(path) or "."
        cached = self._files.get((folder, name, dots))
        if cached is None:
            cached = self._files[(folder, name, dots)] = self._look(folder, name, dots)
        return cached

    def _look(self, folder: str, name: str, dots: int) -> tuple[str, ...]:
        parts = [part for part in name.split(".") if part]
        ups = [dots - 1] if dots else range(4)
        for up in ups:
            root = folder
            for _ in range(up):
                root = os.path.dirname(root) or "."
            if parts and not {parts[0], parts[0] + ".py"} & self._names(root):
                continue
            base = os.path.join(root, *parts)
            for candidate in (base + ".py", os.path.join(base, "__init__.py")) if parts else (base + "/__init__.py",):
                if os.path.isfile(candidate):
                    return (os.path.normpath(candidate),)
        return ()

    def _names(self, folder: str) -> frozenset[str]:
        """What is in a folder; looked at once."""
        if folder not in self._entries:
            try:
                self._entries[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._entries[folder] = frozenset()
        return self._entries[folder]


_FRAMEWORKS = frozenset(
    "accelerate lightning pytorch_lightning deepspeed horovod ray composer ignite colossalai megatron fastai".split()
)


_ELSEWHERE = frozenset(
    "torch torchvision numpy os sys math time json random argparse typing pathlib functools collections "
    "logging re datetime contextlib dataclasses itertools copy pickle glob shutil tqdm PIL yaml transformers "
    "datasets wandb".split()
)


def _conditional(module: SourceFile, call: ast.Call, function: ast.AST) -> bool:
    """Whether a collective in a function is only for some: of a group, or under a condition on the rank."""
    if any(argument.arg in ("group", "process_group") for argument in call.keywords) or len(call.args) > 2:
        return True
    return any(True for _ in guards(module, call)) or module.scope(call) is not function
