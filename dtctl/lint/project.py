"""Files, and the local files that they import."""

from __future__ import annotations

import ast
import bisect
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dtctl.lint import names
from dtctl.lint.source import decode_source, read_source_bytes
from dtctl.lint.source_file import Definition, Function, SourceFile, format_dotted_name
from dtctl.python_source import parse_python

MAX_FILES = 40
"""Largest number of local files that are read for one file."""
MAX_AROUND = 300
"""Largest number of files that are searched for imports of one file."""
MAX_IMPORTERS = 8
"""Largest number of importing files that are read for one file."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[.\w]+)[ \t]+)?import[ \t]+(?P<names>\([^)]*\)|[^\n#;]+)", re.MULTILINE
)
_BEGINS = re.compile(
    r"init_process_group|DistributedDataParallel|FullyShardedDataParallel|fully_shard|Accelerator\(|deepspeed\.init|horovod"
)
_WRAPS = (names.INIT, *names.WRAPPERS, *names.ENGINES)
"""Functions after whose call a program is distributed."""
_DOTTED = re.compile(r"\w[\w.]*")


class Project:
    """Modules by path; each file is read and parsed once."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Create a project; `files` are linted, and may import each other."""
        self._known = sorted(os.path.normpath(path) for path in files if path.suffix == ".py")
        self._modules: dict[str, SourceFile | None] = {}
        self._definitions: dict[tuple[str, str], Definition | None] = {}
        self._callers: dict[Function, list[tuple[SourceFile, ast.Call]]] = {}
        self._distributed: dict[SourceFile, bool] = {}
        self._near: dict[str, tuple[str, ...]] = {}
        self._sources: dict[str, str] = {}
        self._matched: dict[tuple[str, re.Pattern[str] | str], bool] = {}
        self._names_of: dict[str, tuple[tuple[str, int], ...]] = {}
        self._having: dict[tuple[SourceFile, tuple[str, ...]], tuple[SourceFile, ...]] = {}
        self._words: dict[tuple[str, ...], dict[str, list[str]]] = {}
        self._importers: dict[str, tuple[str, ...]] = {}
        self._files_of: dict[str, tuple[str, ...]] = {}
        self._reach: dict[str, tuple[str, ...]] = {}
        self._entries: dict[str, frozenset[str]] = {}
        self._files: dict[tuple[str, str, int], tuple[str, ...]] = {}

    def add(self, module: SourceFile) -> None:
        """Add a module that was read already."""
        module.neighbours = self
        self._modules[os.path.normpath(module.path)] = module

    def get_parsed_module(self, path: Path, text: str) -> SourceFile | None:
        """Return the module of a file if the same text was parsed before; else None."""
        module = self._modules.get(os.path.normpath(path))
        return module if module is not None and module.text == text else None

    def module(self, path: str) -> SourceFile | None:
        """Return the module of a file; None if the file cannot be read or parsed."""
        if path not in self._modules:
            try:
                text = self._read_source_text(path)
                module = self._modules[path] = SourceFile(Path(path), text, parse_python(text))
                module.neighbours = self
            except (OSError, SyntaxError, RecursionError):
                self._modules[path] = None
        return self._modules[path]

    def list_imported_paths(self, module: SourceFile) -> tuple[str, ...]:
        """Return the paths of a module and its direct and indirect local imports, without parsing them."""
        own = os.path.normpath(module.path)
        cached = self._reach.get(own)
        if cached is None:
            self._sources.setdefault(own, module.text)
            reached, queue = {own: None}, [own]
            while queue and len(reached) < MAX_FILES:
                for path in self._find_imported_files(queue.pop(0)):
                    if path not in reached and self._read_source_text(path):
                        reached[path] = None
                        queue.append(path)
            cached = self._reach[own] = tuple(reached)
        return cached

    def find_modules_with_words(self, module: SourceFile, *words: str) -> tuple[SourceFile, ...]:
        """Return the modules with one of these words, among a module and its local imports."""
        fact = (module, words)
        cached = self._having.get(fact)
        if cached is None:
            paths = [
                path for path in self.list_imported_paths(module) if any(self._matches(path, word) for word in words)
            ]
            found = [other for path in paths if (other := self.module(path)) is not None]
            cached = self._having[fact] = tuple(found)
        return cached

    def has_text(self, module: SourceFile, pattern: re.Pattern[str] | str, *, elsewhere: bool = False) -> bool:
        """Return whether the text of a module or of its imports has a word or matches a pattern.

        Args:
            module: module at which the search begins.
            pattern: word or pattern.
            elsewhere: whether to search only the imports.
        """
        return any(self._matches(path, pattern) for path in self.list_imported_paths(module)[elsewhere:])

    def _matches(self, path: str, pattern: re.Pattern[str] | str) -> bool:
        """Return whether the text of a file has a word or matches a pattern; the result is cached."""
        fact = (path, pattern)
        if fact not in self._matched:
            text = self._read_source_text(path)
            self._matched[fact] = pattern in text if isinstance(pattern, str) else pattern.search(text) is not None
        return self._matched[fact]

    def calls(self, module: SourceFile, name: str) -> bool:
        """Return whether a module or its imports call a function with this resolved name."""
        if module.calls.get(name):
            return True
        word = "horovod" if name.endswith(".init") else name.rpartition(".")[2]  # most files have the word "init"
        return any(source.calls.get(name) for source in self.find_modules_with_words(module, word))

    def methods(self, module: SourceFile, name: str) -> bool:
        """Return whether a module or its imports call anything whose last part is `name`."""
        if module.methods.get(name):
            return True
        return any(source.methods.get(name) for source in self.find_modules_with_words(module, name))

    def is_distributed_training(self, module: SourceFile) -> bool:
        """Return whether a module, with its imports, takes part in distributed training."""
        return module.trains or any(
            any(self._matches(path, word) for word in names.TRAINS) for path in self.list_imported_paths(module)
        )

    def distributed(self, module: SourceFile) -> bool:
        """Return whether a module is part of a program that starts a process group or wraps a model.

        The module does so itself, calls a function of another file that does, or is imported by a file that does
        either.
        """
        cached = self._distributed.get(module)
        if cached is None:
            self._distributed[module] = False
            cached = self._distributed[module] = (
                self.has_text(module, _BEGINS) and self._is_distributed_module(module)
            ) or any(
                (other := self.module(path)) is not None and self._is_distributed_module(other)
                for path in self._find_importing_files(module)[:MAX_IMPORTERS]
                if any(self._matches(each, _BEGINS) for each in (path, *self._find_imported_files(path)[:MAX_FILES]))
            )
        return cached

    def _is_distributed_module(self, module: SourceFile) -> bool:
        """Return whether a module starts a process group or wraps a model, directly or in another file's function."""
        if any(module.calls.get(name) for name in _WRAPS):
            return True
        for name, qualified in module.aliases.items():
            if qualified.partition(".")[0] in _ELSEWHERE or name not in module.used:
                continue
            found = self.definition(module, qualified)
            if found is not None and not isinstance(found.node, ast.expr) and self._is_distributed_definition(found, 3):
                return True
            if found is None and not qualified.startswith("torch"):
                for path in self.files(module.path, qualified.lstrip("."), len(qualified) - len(qualified.lstrip("."))):
                    other = self.module(path)
                    if other is not None and any(
                        self._is_distributed_definition(Definition(other, function), 2)
                        for last in module.used[name] for function in other.functions.get(last, ())
                    ):  # fmt: skip
                        return True
        return False

    def _is_distributed_definition(self, definition: Definition, depth: int) -> bool:
        """Return whether a function or class starts a process group or wraps a model, directly or in its calls."""
        fact = ("wraps", definition.node)
        module = definition.module
        if fact not in module.facts:
            module.facts[fact] = False  # for functions that call each other
            calls = [call for name in _WRAPS for call in module.calls.get(name, ())]
            found = any(module.is_node_within(call, definition.node) for call in calls)
            if not found and depth:
                for name, others in module.functions.items():
                    if found or not any(
                        module.is_node_within(call, definition.node) for call in module.methods.get(name, ())
                    ):
                        continue
                    found = any(
                        self._is_distributed_definition(Definition(module, other), depth - 1) for other in others
                    )
                for name in module.used if not found else ():
                    qualified = module.aliases.get(name)
                    if qualified is None or not any(
                        module.is_node_within(call, definition.node) for call in module.calls_by_import[name]
                    ):
                        continue
                    for last in module.used[name]:
                        dotted = qualified if last == name else f"{qualified}.{last}"
                        other_definition = self.definition(module, dotted)
                        if other_definition is not None and not isinstance(other_definition.node, ast.expr):
                            found = found or self._is_distributed_definition(other_definition, depth - 1)
            module.facts[fact] = found
        return bool(module.facts[fact])

    def uses_framework(self, module: SourceFile) -> bool:
        """Return whether a framework divides the data and wraps the model.

        A framework that is imported next to torch's own process group or sampler is an alternative and does not count.
        """
        if self.framework_has_loop(module):
            return True
        own = any(self.calls(module, name) for name in (names.INIT, names.SAMPLER))
        return not own and self._has_package_import(module, _ENGINES)

    def framework_has_loop(self, module: SourceFile) -> bool:
        """Return whether a framework has the training loop, and thus the logging and saving by rank."""
        return not module.calls.get(names.INIT) and self._has_package_import(module, _FRAMEWORKS)

    def _has_package_import(self, module: SourceFile, packages: frozenset[str]) -> bool:
        return any(
            name.partition(".")[0] in packages
            for path in self.list_imported_paths(module)[:4]
            for name, dots in self._parse_imports(path)
            if not dots
        )

    def definition(self, module: SourceFile, name: str) -> Definition | None:
        """Return the definition of an imported dotted name in its local file; None for other names.

        Args:
            module: the file that imports it.
            name: dotted name, with leading dots for a relative import.
        """
        fact = (str(module.path), name)
        if fact not in self._definitions:
            self._definitions[fact] = None  # for modules that import each other
            self._definitions[fact] = self._find_definition(module, name)
        return self._definitions[fact]

    def _find_definition(self, module: SourceFile, name: str) -> Definition | None:
        bare = name.lstrip(".")
        dots, parts = len(name) - len(bare), bare.split(".")
        if not dots and parts[0] in _ELSEWHERE:
            return None
        for split in range(len(parts) - 1, -1 if dots else 0, -1):
            for path in self.files(module.path, ".".join(parts[:split]), dots):
                other = self.module(path)
                if other is not None and other is not module:
                    return self._find_name_in_module(other, parts[split:])
        return None

    def _find_name_in_module(self, module: SourceFile, rest: list[str]) -> Definition | None:
        """Return the definition of a name in a module, which may import the name from another one."""
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
        """Return the calls of a function, in its file and in files that import it.

        For a method, these are all calls of a method with this name, except on objects of other known classes.
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
                cached += [(source, call) for call in calls if self._can_call_function(source, call, module, function)]
        return cached

    def _can_call_function(self, source: SourceFile, call: ast.Call, module: SourceFile, function: Function) -> bool:
        """Return whether a call may be a call of a function."""
        if source.scope(call) is function:
            return False
        in_class = isinstance(module.parents.get(function), ast.ClassDef)
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if source is module:
                return name in source.functions or name in source.classes or name not in source.aliases
            if name not in source.aliases:
                return bool(source.stars)
            found = self.definition(source, source.aliases[name])
            return found is None or found.node in (function, module.parents.get(function))
        if not isinstance(call.func, ast.Attribute):
            return False
        root = format_dotted_name(call.func.value)
        if in_class:
            if function.name == "__init__":
                return root in source.aliases
            own_class = source.find_enclosing_node(call, (ast.ClassDef,))
            return root != "self" or (source is module and own_class is module.parents.get(function))
        return root in source.aliases

    def importers(self, module: SourceFile, name: str = "") -> tuple[SourceFile, ...]:
        """Return files that import a module, among those of the run and those near the module.

        Args:
            module: imported module.
            name: word that the files must contain; empty for any.
        """
        chosen = [
            path for path in self._find_importing_files(module) if not name or name in self._read_source_text(path)
        ][:MAX_IMPORTERS]
        return tuple(other for path in chosen if (other := self.module(path)) is not None)

    def _find_importing_files(self, module: SourceFile) -> tuple[str, ...]:
        """Return the paths of the files that import a module."""
        own = os.path.normpath(module.path)
        cached = self._importers.get(own)
        if cached is None:
            stem = os.path.splitext(os.path.basename(own))[0]
            if stem == "__init__":
                stem = os.path.basename(os.path.dirname(os.path.abspath(own)))
            paths = [path for path in self._build_word_index(os.path.dirname(own) or ".").get(stem, ()) if path != own]
            cached = self._importers[own] = tuple(path for path in paths if own in self._find_imported_files(path))
        return cached

    def _build_word_index(self, folder: str) -> dict[str, list[str]]:
        """Return word of an import statement -> files near a folder that have this word."""
        around = self._list_nearby_files(folder)
        index = self._words.get(around)
        if index is None:
            index = self._words[around] = {}
            for path in around:
                for word in self._import_words(path):
                    index.setdefault(word, []).append(path)
        return index

    def _import_words(self, path: str) -> frozenset[str]:
        return frozenset(part for name, _ in self._parse_imports(path) for part in name.split("."))

    def _parse_imports(self, path: str) -> tuple[tuple[str, int], ...]:
        """Return the dotted names that a file imports, with their leading dots, by a pattern and no parser."""
        if path not in self._names_of:
            found: dict[tuple[str, int], None] = {}
            for match in _IMPORT.finditer(self._read_source_text(path)):
                base = (match["base"] or "").lstrip(".")
                dots = len(match["base"] or "") - len(base)
                if match["base"] is not None:
                    found[(base, dots)] = None
                for part in match["names"].strip("()").split(","):
                    name = part.strip().split(" ")[0]
                    if _DOTTED.fullmatch(name):
                        found[(f"{base}.{name}" if base else name, dots)] = None
            self._names_of[path] = tuple(found)
        return self._names_of[path]

    def _read_source_text(self, path: str) -> str:
        """Return the text of a file; empty if the file cannot be read."""
        if path not in self._sources:
            try:
                self._sources[path] = decode_source(read_source_bytes(Path(path)), python=True).text
            except (OSError, SyntaxError, ValueError):
                self._sources[path] = ""
        return self._sources[path]

    def _list_nearby_files(self, folder: str) -> tuple[str, ...]:
        """Return the run's files in the package of a folder, above it and below it, the nearest first."""
        if folder not in self._near:
            root = folder
            while os.path.isfile(os.path.join(root, "__init__.py")) and os.path.dirname(root) not in ("", root):
                root = os.path.dirname(root)
            above = os.path.dirname(root) or "."
            beside = [
                os.path.normpath(os.path.join(parent, name))
                for parent in dict.fromkeys((folder, root, above))
                for name in sorted(self._list_folder_names(parent))
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

    def _find_imported_files(self, path: str) -> tuple[str, ...]:
        """Return the local files that a file imports."""
        if path not in self._files_of:
            here = Path(path)
            self._files_of[path] = tuple(
                dict.fromkeys(
                    found
                    for name, dots in self._parse_imports(path)
                    if dots or name.partition(".")[0] not in _ELSEWHERE
                    for found in self.files(here, name, dots)
                )
            )
        return self._files_of[path]

    def files(self, path: Path, name: str, dots: int) -> tuple[str, ...]:
        """Return the files of a module that `path` imports: next to it or, as for packages, further up."""
        folder = os.path.dirname(path) or "."
        cached = self._files.get((folder, name, dots))
        if cached is None:
            cached = self._files[(folder, name, dots)] = self._find_module_file(folder, name, dots)
        return cached

    def _find_module_file(self, folder: str, name: str, dots: int) -> tuple[str, ...]:
        parts = [part for part in name.split(".") if part]
        ups = [dots - 1] if dots else range(4)
        for up in ups:
            root = folder
            for _ in range(up):
                root = os.path.dirname(root) or "."
            if parts and not {parts[0], parts[0] + ".py"} & self._list_folder_names(root):
                continue
            base = os.path.join(root, *parts)
            for candidate in (base + ".py", os.path.join(base, "__init__.py")) if parts else (base + "/__init__.py",):
                if os.path.isfile(candidate):
                    return (os.path.normpath(candidate),)
        return ()

    def _list_folder_names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder; the result is cached."""
        if folder not in self._entries:
            try:
                self._entries[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._entries[folder] = frozenset()
        return self._entries[folder]


_FRAMEWORKS = frozenset("lightning pytorch_lightning ray composer ignite colossalai megatron fastai".split())
_ENGINES = frozenset(("accelerate", "deepspeed", "horovod"))
"""Frameworks that a program's own loop calls."""


_ELSEWHERE = frozenset(
    "torch torchvision numpy os sys math time json random argparse typing pathlib functools collections "
    "logging re datetime contextlib dataclasses itertools copy pickle glob shutil tqdm PIL yaml transformers "
    "datasets wandb".split()
)
