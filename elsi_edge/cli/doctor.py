"""`elsi-edge doctor`: what this machine and this installation offer, and what is missing."""

from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False) -> None:
    """Show versions, CPU features, cores, providers, extras and the cache, and name what is missing."""
    from elsi_edge.cli import common

    report = examine()
    if json:
        common.emit_json(report)
        return
    cpu, memory, cached = report["cpu"], report["memory"], report["cache"]
    quota = "no quota" if cpu["quota"] is None else f"quota {cpu['quota']:g}"
    rows = {
        "elsi-edge": f"{report['version']}, Python {report['python']}, {report['system']}",
        "packages": ", ".join(f"{name} {version}" for name, version in report["packages"].items()),
        "CPU": f"{cpu['name']}; {cpu['usable_cores']} usable cores (affinity {cpu['affinity']}, {quota})",
        "features": " ".join(cpu["features"]) or "none known",
        "memory": f"{common.size_text(memory['available'])} free of {common.size_text(memory['total'])}",
        "providers": ", ".join(report["providers"]) or "none",
        "operators": report["native"]["note"],
        "extras": ", ".join(f"{name}: {_extra_text(extra)}" for name, extra in report["extras"].items()),
        "cache": f"{cached['path']}, {common.size_text(cached['bytes'])} in {len(cached['entries'])} entries",
    }
    for name, text in rows.items():
        common.out.print(f"{name:<10} {text}", soft_wrap=True)
    for problem in report["problems"]:
        common.out.print(f"missing    {problem}", soft_wrap=True)
    if not report["problems"]:
        common.out.print("missing    nothing", soft_wrap=True)


def examine() -> dict[str, Any]:
    """Everything that `doctor` shows, as plain values. Sizes in bytes."""
    import platform

    import psutil

    from elsi_edge import cache, machine
    from elsi_edge._version import __version__

    cores, memory = machine.cores(), psutil.virtual_memory()
    requirements = _requirements()
    providers = _providers()
    extras = {name: _extra(packages) for name, packages in requirements.items() if name}
    entries = cache.entries()
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version for name in requirements.get("", []) if (version := _version(name))},
        "cpu": {
            "name": machine.cpu_name(),
            "features": machine.cpu_features(),
            "affinity": cores.affinity,
            "quota": cores.quota,
            "usable_cores": cores.usable,
        },
        "memory": {"total": memory.total, "available": memory.available},
        "providers": providers,
        "native": _native() if providers else {"available": False, "path": "", "note": "onnxruntime cannot be loaded"},
        "extras": extras,
        "cache": {
            "path": str(cache.models_dir()),
            "bytes": sum(entry.size for entry in entries),
            "entries": [entry.name for entry in entries],
            "writable": _writable(cache.home()),
        },
    }
    report["problems"] = _problems(report, requirements.get("", []))
    return report


def _problems(report: dict[str, Any], base: list[str]) -> list[str]:
    found = [f"the package {name}: pip install elsi-edge" for name in base if _version(name) is None]
    if not report["providers"]:
        found.append("onnxruntime cannot be loaded: pip install --force-reinstall onnxruntime")
    if not report["native"]["available"]:
        found.append(f"faster verification: {report['native']['note']}")
    missing = report["extras"].get("build", {}).get("missing", [])
    if missing:
        found.append(f"to export and train ({', '.join(missing)}): pip install 'elsi-edge[build]'")
    if not report["cache"]["writable"]:
        found.append(
            f"write access to the cache {report['cache']['path']}; cached models work, ELSI_EDGE_HOME moves it"
        )
    return found


def _requirements() -> dict[str, list[str]]:
    """Distribution names by extra, "" for the base, as the installed package declares them."""
    import importlib.metadata
    import re

    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("elsi-edge") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        if name is not None:
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def _extra(packages: list[str]) -> dict[str, Any]:
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    return {"installed": not missing, "missing": missing, "packages": {n: v for n, v in versions.items() if v}}


def _extra_text(extra: dict[str, Any]) -> str:
    if extra["installed"]:
        return "installed"
    return "not installed" if not extra["packages"] else f"incomplete, {', '.join(extra['missing'])} missing"


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def _native() -> dict[str, Any]:
    from elsi_edge.runtime.native_ops import report

    found = report()
    return {"available": found.available, "path": found.path, "note": found.note()}


def _writable(path: Path) -> bool:
    import os

    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK)
