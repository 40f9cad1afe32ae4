"""What `torch.save` wrote → Python objects, by torch's weights-only unpickler and nothing else.

Checked before torch sees the file: the archive's structure and checksums (torch ignores a CRC),
every global that its pickle names, the sizes it claims for storages and tensors, and what it calls
with which arguments (torch trusts them).
"""

import io
import warnings
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

from fuseport.exporter.checkpoint import pickles
from fuseport.exporter.checkpoint.allowed import STAND_INS, refused
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.disarmed import disarmed
from fuseport.exporter.checkpoint.sniff import Container
from fuseport.exporter.checkpoint.zip_file import opened, reason
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["read_part", "read_torch"]

_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # opens torch.save's older format
_LEGACY_PICKLES = 5  # magic number, protocol version, system info, the object, the storage keys
_LISTED = 50


def read_torch(path: Path, container: Container) -> object:
    """The object in a file that torch.save wrote, tensors on the CPU (memory-mapped if possible).

    Raises:
        UnsafeInput: loading it would run code: a pickle that names anything but tensors and plain
            data, a TorchScript archive, an exported program.
        CorruptInput: torch.save did not write it, or it is damaged.
    """
    if container == "zip":
        _check_archive(path, path.stat().st_size)
    else:
        _check_pickle_file(path)
    # torch.load hands any path that ends in .safetensors to another reader: give it an open file.
    if container == "zip" and path.suffix != ".safetensors":
        return _torch_load(path, str(path), mmap=True)
    with path.open("rb") as file:
        return _torch_load(path, file, mmap=False)


def read_part(path: Path, begin: int, length: int) -> object:
    """The object that torch.save wrote to a part of a file, tensors in memory of their own.

    Args:
        path: the file.
        begin: of the part, in bytes.
        length: of the part, in bytes.

    Raises:
        UnsafeInput, CorruptInput: as `read_torch`.
    """
    with path.open("rb") as file:
        file.seek(begin)
        part = io.BytesIO(file.read(length))
    _check_archive(path, length, part)
    part.seek(0)
    return _torch_load(path, part, mmap=False)


def _torch_load(path: Path, source: str | BinaryIO, mmap: bool) -> object:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(STAND_INS):
            warnings.simplefilter("ignore")
            loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
            return disarmed(loaded)
    except OSError:
        raise
    except Exception as error:
        # torch parses hostile bytes here and raises a dozen types, IndexError and RuntimeError
        # among them. All mean the same to the user, and none is retried in another way.
        raise CorruptInput(
            f"{show(path)}: torch cannot read it ({reason(error)}); fetch or save it again"
        ) from error


def _check_archive(path: Path, size: int, part: BinaryIO | None = None) -> None:
    with opened(path, part) as archive:
        members = {member.filename: member for member in archive.infolist()}
        _refuse_programs(path, list(members))
        pickle = _pickle_member(path, list(members))
        for name, member in members.items():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
                raise CorruptInput(
                    f"{show(path)}: {show(name)}: compressed, which torch.save never does;"
                    " save the weights again with torch.save"
                )
        if sum(member.file_size for member in members.values()) > size:
            raise CorruptInput(f"{show(path)}: its members overlap; save the file again")
        damaged = archive.testzip()
        if damaged is not None:
            raise CorruptInput(
                f"{show(path)}: {show(damaged)}: its checksum does not match; fetch the file"
                " again (or save it without set_crc32_options(False))"
            )
        found = pickles.scan(io.BytesIO(archive.read(pickle)))
    _judge(path, pickle, found)
    root = pickle.removesuffix("data.pkl")
    for key, claimed in found.storages.items():
        record = members.get(f"{root}data/{key}")
        if record is None or claimed > record.file_size:
            raise CorruptInput(
                f"{show(path)}: {show(root)}data/{show(key)}: the pickle claims {claimed} bytes,"
                f" the archive holds {record.file_size if record else 'none'}; save the file again"
            )


def _check_pickle_file(path: Path) -> None:
    with path.open("rb") as file:
        legacy = file.read(len(_MAGIC)) == _MAGIC
        file.seek(0)
        found = pickles.scan(file, _LEGACY_PICKLES if legacy else 1)
        end = file.tell()
    if not legacy and found.broken is not None and not refused(found.names):
        raise CorruptInput(
            f"{show(path)}: not recognised as a checkpoint; give a file that torch.save, Lightning"
            " or safetensors wrote"
        )
    _judge(path, "pickle", found)
    if not legacy:
        raise CorruptInput(
            f"{show(path)}: a plain pickle, which torch.save did not write; save the weights with"
            " torch.save(model.state_dict(), ...)"
        )
    # The numbers follow the last pickle, which lists their storages: a count of 8 bytes for each,
    # and its bytes. Of a storage that it does not list, torch gives what the memory had.
    if found.storages.keys() != found.texts:
        raise CorruptInput(
            f"{show(path)}: its list of storages is not that of its tensors; fetch or save it again"
        )
    if end + sum(8 + claimed for claimed in found.storages.values()) > path.stat().st_size:
        raise CorruptInput(
            f"{show(path)}: its storages claim more bytes than the file has; fetch or save it again"
        )


def _judge(path: Path, member: str, found: pickles.Scan) -> None:
    bad = refused(found.names)
    if bad:
        more = f" and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        raise UnsafeInput(
            f"{show(path)}: {show(member)}: loading it would import and call"
            f" {', '.join(show(name) for name in bad[:_LISTED])}{more}; nothing was run: where"
            " the file was made, save the tensors alone: torch.save({n: t for n, t in"
            " model.state_dict().items() if torch.is_tensor(t)}, ...)"
        )
    if found.broken is not None:
        raise CorruptInput(
            f"{show(path)}: {show(member)}: {show(found.broken)}; fetch or save the file again"
        )


def _refuse_programs(path: Path, names: list[str]) -> None:
    inner = [name.partition("/")[2] for name in names]
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        raise UnsafeInput(
            f"{show(path)}: a TorchScript archive, which is a program and not a checkpoint; give"
            " the weights alone, as torch.save(module.state_dict(), ...) writes them"
        )
    if "archive_format" in inner or any("serialized_exported_program" in name for name in names):
        raise UnsafeInput(
            f"{show(path)}: an exported program, not a checkpoint; give the weights alone, as"
            " torch.save(module.state_dict(), ...) writes them"
        )


def _pickle_member(path: Path, names: list[str]) -> str:
    found = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise CorruptInput(
            f"{show(path)}: a zip archive that torch.save did not write ({len(found)} data.pkl in"
            " it); give a checkpoint"
        )
    return found[0]
