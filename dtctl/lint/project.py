"""Files and the local files that they import."""

from __future__ import annotations

import ast
import bisect
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dtctl.lint import names
from dtctl.lint.source import decoded, read
from dtctl.lint.source_file import Definition, Function, SourceFile, key

MAX_FILES = 40
"""Local files that are looked at for one file."""
MAX_AROUND = 300
"""Files that are asked whether they import one."""
_IMPORTS = re.compile(r"^[ \t]*(?:from|import)\b([^\n#]+(?:\([^)]*\))?)", re.MULTILINE)
_WORD = re.compile(r"\w+")


class Project:
    """Modules by path; each file is read and parsed once."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Args: files: those that are linted; they may import each other."""
        self._known = sorted(os.path.normpath(path) for path in files if path.suffix == ".py")
        self._modules: dict[str, SourceFile | None] = {}
        self._definitions: dict[tuple[str, str], Definition | None] = {}
        self._callers: dict[Function, list[tuple[SourceFile, ast.Call]]] = {}
        self._distributed: dict[SourceFile, bool] = {}
        self._near: dict[str, tuple[str, ...]] = {}
        self._texts: dict[str, frozenset[str]] = {}
        self._words: dict[tuple[str, ...], dict[str, list[str]]] = {}
        self._importers: dict[SourceFile, tuple[SourceFile, ...]] = {}
        self._files_of: dict[SourceFile, frozenset[str]] = {}
        self._reach: dict[SourceFile, tuple[SourceFile, ...]] = {}
        self._entries: dict[str, frozenset[str]] = {}
        self._files: dict[tuple[str, str, int], tuple[str, ...]] = {}

    def add(self, module: SourceFile) -> None:
        """Remember a module that was read already."""
        module.neighbours = self
        self._modules[os.path.normpath(module.path)] = module

    def parsed(self, path: Path, text: str) -> SourceFile | None:
        """The module in a file, if it was parsed for another one already, from the same text."""
        module = self._modules.get(os.path.normpath(path))
        return module if module is not None and module.text == text else None

    def module(self, path: str) -> SourceFile | None:
        """The module in a file; None when it cannot be read or parsed."""
        if path not in self._modules:
            try:
                text = decoded(read(Path(path)), python=True).text
                module = self._modules[path] = SourceFile(Path(path), text, ast.parse(text))
                module.neighbours = self
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self._modules[path] = None
        return self._modules[path]

    def reach(self, module: SourceFile) -> tuple[SourceFile, ...]:
        """A module and the local ones that it imports, directly or over others."""
        cached = self._reach.get(module)
        if cached is None:
            reached, queue = {os.path.normpath(module.path): module}, [module]
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

    def distributed(self, module: SourceFile) -> bool:
        """Whether a module is part of a program that starts a process group or wraps a model: over its imports, too,
        and over the files that import it.
        """
        cached = self._distributed.get(module)
        if cached is None:
            cached = self._distributed[module] = any(
                self.calls(source, name)
                for source in (module, *self.importers(module)[:6])
                for name in (names.INIT, *names.WRAPPERS)
            )
        return cached

    def framework(self, module: SourceFile) -> bool:
        """Whether a framework does the distribution: samplers, devices and saving are its part."""
        return any(
            name.partition(".")[0] in _FRAMEWORKS
            for source in self.reach(module)[:4]
            for name, dots in source.imports
            if not dots
        )

    def definition(self, module: SourceFile, name: str) -> Definition | None:
        """What a dotted name that a file imports is, in the local file that defines it; None for anything else.

        Args:
            module: the file that imports it.
            name: with leading dots for a relative import.
        """
        fact = (str(module.path), name)
        if fact not in self._definitions:
            self._definitions[fact] = None  # for modules that import each other
            self._definitions[fact] = self._defined(module, name)
        return self._definitions[fact]

    def _defined(self, module: SourceFile, name: str) -> Definition | None:
        bare = name.lstrip(".")
        dots, parts = len(name) - len(bare), bare.split(".")
        if not dots and parts[0] in _ELSEWHERE:
            return None
        for split in range(len(parts) - 1, -1 if dots else 0, -1):
            for path in self.files(module.path, ".".join(parts[:split]), dots):
                other = self.module(path)
                if other is not None and other is not module:
                    return self._in(other, parts[split:])
        return None

    def _in(self, module: SourceFile, rest: list[str]) -> Definition | None:
        """What a name is in a module: defined there, or imported from elsewhere."""
        first = rest[0]
        functions = [node for node in module.functions.get(first, []) if module.parents[node] is module.tree]
        if functions and len(rest) == 1:
            return Definition(module, functions[-1])
        if first in module.classes:
            owner = module.classes[first]
            if len(rest) == 1:
                return Definition(module, owner)
            members = [node for node in owner.body if isinstance(node, Function) and node.name == rest[1]]
            return Definition(module, members[-1]) if members and len(rest) == 2 else None
        if first in module.aliases:
            return self.definition(module, ".".join([module.aliases[first], *rest[1:]]))
        values = [bound.value for bound in module.bindings.get((module.tree, first), []) if bound.value is not None]
        if values and len(rest) == 1:
            return Definition(module, values[-1])
        for star in module.stars:
            found = self.definition(module, ".".join([star, *rest]))
            if found is not None:
                return found
        return None

    def callers(self, module: SourceFile, function: Function) -> list[tuple[SourceFile, ast.Call]]:
        """The calls of a function, in its file and in those that import it.

        For a method they are all calls of a method of that name whose object is not known to be another one.
        """
        cached = self._callers.get(function)
        if cached is None:
            cached = self._callers[function] = []
            name = function.name
            owner = module.parents.get(function)
            if name == "__init__" and isinstance(owner, ast.ClassDef):
                name = owner.name
            for source in (module, *self.importers(module, name)):
                calls = [*source.methods.get(name, ()), *source.started.get(name, ())]
                cached += [(source, call) for call in calls if self._calls(source, call, module, function)]
        return cached

    def _calls(self, source: SourceFile, call: ast.Call, module: SourceFile, function: Function) -> bool:
        """Whether a call may be one of a function."""
        if source.scope(call) is function:
            return False
        in_class = isinstance(module.parents.get(function), ast.ClassDef)
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if source is module:
                return name in source.functions or name in source.classes or name not in source.aliases
            return name in source.aliases or bool(source.stars)
        if not isinstance(call.func, ast.Attribute):
            return False
        root = key(call.func.value)
        if in_class:
            if function.name == "__init__":
                return root in source.aliases
            own_class = source.enclosing(call, (ast.ClassDef,))
            return root != "self" or (source is module and own_class is module.parents.get(function))
        return root in source.aliases

    def importers(self, module: SourceFile, name: str = "") -> tuple[SourceFile, ...]:
        """Files of the run, and those beside a module, that import it.

        Args:
            module: what they import.
            name: what has to stand in them.
        """
        cached = self._importers.get(module)
        if cached is None:
            own = os.path.normpath(module.path)
            stem = os.path.splitext(os.path.basename(own))[0]
            if stem == "__init__":
                stem = os.path.basename(os.path.dirname(os.path.abspath(own)))
            found = []
            for path in self._naming(os.path.dirname(own) or ".").get(stem, ()):
                other = self.module(path) if path != own else None
                if other is not None and own in self._imported_files(other):
                    found.append(other)
            cached = self._importers[module] = tuple(found)
        return tuple(source for source in cached if name in source.text) if name else cached

    def _naming(self, folder: str) -> dict[str, list[str]]:
        """Word of an import statement -> the files around a folder that have it."""
        around = self._around(folder)
        index = self._words.get(around)
        if index is None:
            index = self._words[around] = {}
            for path in around:
                for word in self._import_words(path):
                    index.setdefault(word, []).append(path)
        return index

    def _import_words(self, path: str) -> frozenset[str]:
        if path not in self._texts:
            try:
                text = read(Path(path)).decode("utf-8", "replace")
            except OSError:
                text = ""
            lines = _IMPORTS.findall(text)
            self._texts[path] = frozenset(word for line in lines for word in _WORD.findall(line))
        return self._texts[path]

    def _imported_files(self, module: SourceFile) -> frozenset[str]:
        if module not in self._files_of:
            self._files_of[module] = frozenset(self.imported(module))
        return self._files_of[module]

    def _around(self, folder: str) -> tuple[str, ...]:
        """Files of the run in the package of a folder, in the one above it, and those in it; the nearest first."""
        if folder not in self._near:
            root = folder
            while os.path.isfile(os.path.join(root, "__init__.py")) and os.path.dirname(root) not in ("", root):
                root = os.path.dirname(root)
            above = os.path.dirname(root) or "."
            beside = [
                os.path.normpath(os.path.join(parent, name))
                for parent in dict.fromkeys((folder, root, above))
                for name in sorted(self._names(parent))
                if name.endswith(".py")
            ]
            prefix = "" if root == "." else os.path.join(root, "")
            first = bisect.bisect_left(self._known, prefix)
            below = []
            for known in self._known[first : first + MAX_AROUND]:
                if not known.startswith(prefix):
                    break
                below.append(known)
            self._near[folder] = tuple(dict.fromkeys([*beside[:MAX_AROUND], *below]))[:MAX_AROUND]
        return self._near[folder]

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
