# SPDX-License-Identifier: GPL-3.0-or-later
"""The signed local apt repositories with stand-in driver and toolkit packages, built from apt/ and nvml/."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from .common import HERE, cache_root, cached_folder, digest, file_digest, locked, run, tree_digest, write

APT, NVML = HERE / "apt", HERE / "nvml"
KEY_NAME = "rehearsal-archive-key.asc"
EPOCH = "1767225600"  # the packages carry this date, so that the same sources give the same packages


def ensure() -> Path:
    secret = _signing_key()
    key = digest(tree_digest(APT, NVML, Path(__file__)), file_digest(secret))
    return cached_folder(cache_root() / "apt", key, "local package repository", lambda work: _build(work, secret))


def kernel_release() -> str:
    """The kernel that the stand-in kernel says it is."""
    loader = importlib.machinery.SourceFileLoader("rehearsal_kernel", str(NVML / "kernel"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module.MACHINE["kernel"]


class _Gpg:
    """gpg with a throw-away home: its agent's socket does not bear long paths, and must not stay behind."""

    def __enter__(self) -> _Gpg:
        self.home = tempfile.mkdtemp(prefix="rehearsal-gpg-")
        return self

    def __exit__(self, *_error) -> None:
        run(["gpgconf", "--homedir", self.home, "--kill", "all"])
        shutil.rmtree(self.home, ignore_errors=True)

    def __call__(self, *arguments: str) -> str:
        return run(["gpg", "--homedir", self.home, "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "", *arguments]).stdout


def _signing_key() -> Path:
    secret = cache_root() / "apt" / "signing-key.asc"
    with locked(cache_root() / "apt" / ".key-lock", "the signing key"):
        if not secret.is_file():
            with _Gpg() as gpg:
                gpg("--quick-generate-key", "Rehearsal archive", "ed25519", "sign", "never")
                write(secret, gpg("--armor", "--export-secret-keys"), 0o600)
    return secret


def _build(work: Path, secret: Path) -> None:
    table = json.loads((APT / "packages.json").read_text())
    common = {"kernel": kernel_release()}
    with tempfile.TemporaryDirectory(prefix="rehearsal-deb-") as scratch, _Gpg() as gpg:
        gpg("--import", str(secret))
        write(work / KEY_NAME, gpg("--armor", "--export"))
        for driver in sorted({driver for packages in table["sets"].values() for driver in packages["driver_versions"]}):
            run([str(NVML / "build.sh"), f"{scratch}/{driver}", driver])
        for name, packages in table["sets"].items():
            folder = work / name / "x86_64"
            folder.mkdir(parents=True)
            for driver in packages["driver_versions"]:
                words = {**common, "driver": driver, "v": f"{driver}-{packages['revision']}"}
                for package in packages["packages"]:
                    _package({"version": "{v}", **package}, words, Path(scratch) / driver, folder)
            for package in table["every_set"]:
                _package(package, common, Path(scratch), folder)
            _index(folder)
            gpg("--armor", "--detach-sign", "--output", str(folder / "Release.gpg"), str(folder / "Release"))
            gpg("--clear-sign", "--output", str(folder / "InRelease"), str(folder / "Release"))
    for path in work.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _fill(value, words: dict[str, str]):
    """Replace {driver}, {v} and {kernel}; other braces stay as they are."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace("{" + word + "}", text)
        return value
    if isinstance(value, list):
        return [_fill(item, words) for item in value]
    if isinstance(value, dict):
        return {_fill(key, words): _fill(item, words) for key, item in value.items()}
    return value


def _package(raw: dict, words: dict[str, str], built: Path, work: Path) -> None:
    package = _fill(raw, words)
    name, architecture = package["name"], package.get("architecture", "all")
    with tempfile.TemporaryDirectory(prefix="rehearsal-deb-") as scratch:
        root = Path(scratch) / "root"
        write(root / "usr/share/doc" / name / "README", "Stand-in for the rehearsal host, made from this repository's molecule/rehearsal_host/apt.\n")
        if (APT / "files" / name).is_dir():
            shutil.copytree(APT / "files" / name, root, dirs_exist_ok=True, symlinks=True)
        for path, text in package.get("text_files", {}).items():
            write(root / path, text)
        for path, target in package.get("links", {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
        for file, folder in package.get("built", {}).items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy2(built / file, root / folder, follow_symlinks=False)
        control = {
            "Package": name, "Version": package["version"], "Architecture": architecture, "Section": "non-free/libs", "Priority": "optional",
            "Maintainer": "Rehearsal <root@localhost>",
            **{field: ", ".join(package[field.lower()]) for field in ("Depends", "Provides", "Conflicts", "Replaces") if package.get(field.lower())},
            "Description": f"{package['description']} (rehearsal stand-in)",
        }
        write(root / "DEBIAN/control", "".join(f"{field}: {value}\n" for field, value in control.items()))
        if "triggers" in package:
            write(root / "DEBIAN/triggers", package["triggers"])
        for script in ("postinst", "prerm"):
            source = APT / "scripts" / f"{name}.{script}"
            if source.is_file():
                write(root / "DEBIAN" / script, _fill(source.read_text(), words), 0o755)
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]:
            folder.chmod(0o755)
        version = package["version"].rpartition(":")[2]
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(root), str(work / f"{name}_{version}_{architecture}.deb")],
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH})


def _index(work: Path) -> None:
    """Packages and Release of a flat repository."""
    stanzas = []
    for deb in sorted(work.glob("*.deb")):
        content = deb.read_bytes()
        fields = run(["dpkg-deb", "--field", str(deb)]).stdout.rstrip("\n")
        stanzas.append(f"{fields}\nFilename: ./{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n")
    packages = "\n".join(stanzas).encode()
    write(work / "Packages", packages)
    write(work / "Packages.gz", gzip.compress(packages, mtime=0))
    sums = "".join(f" {file_digest(work / name)} {(work / name).stat().st_size} {name}\n" for name in ("Packages", "Packages.gz"))
    write(work / "Release", "Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitectures: amd64\nDescription: stand-ins for the rehearsal host\n"
          f"Date: {email.utils.formatdate(usegmt=True)}\nSHA256:\n{sums}")
