"""Programs that stand in for Slurm's: they answer from a folder of plain files, and note there what they were asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SBATCH = """\
[ "$(cat "$F/hangs")" != sbatch ] || sleep 600
[ "$(cat "$F/scripts" | wc -l)" -lt "$(cat "$F/taken")" ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }
echo "$1" >> "$F/scripts"
job=$(( 70 + $(cat "$F/scripts" | wc -l) ))
echo "sbatch $(cat "$F/queue" | wc -l)" >> "$F/asked"
places=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
if [ "$places" ]; then seq -f "${job}_%.0f" 0 "$places"; else echo "$job"; fi >> "$F/queue"
echo "$1" > "$F/script"
sed "s/ID/$job/" "$F/prints"
"""
_SQUEUE = """\
echo "squeue $*" >> "$F/asked"
[ "$(cat "$F/hangs")" != squeue ] || { : > "$F/hangs"; sleep 600; }
if [ "$(cat "$F/silent")" -gt 0 ]; then echo $(( $(cat "$F/silent") - 1 )) > "$F/silent"; exit 1; fi
case "$*" in *%T*) cat "$F/state"; exit ;; *%o*) sed "s|_.*||;s|$|\\|$(cat "$F/script")|" "$F/queue"; exit ;; esac
cat "$F/queue"
[ "$(cat "$F/ends")" = no ] || sed -i 1d "$F/queue"
"""
_SCONTROL = """\
[ "$(cat "$F/hangs")" != scontrol ] || sleep 600
echo "scontrol $*" >> "$F/asked"
echo "MaxArraySize            = $(cat "$F/largest")"
"""


_SINFO = """\
[ "$(cat "$F/hangs")" != scontrol ] || sleep 600
echo node7
"""


@dataclass(frozen=True)
class StandIns:
    """Files: `queue`, ids of queued jobs; `ends`, whether each answer of squeue is the last with the first of them; `silent`, how
    often squeue does not answer yet; `state`, what it says of one job; `largest`, MaxArraySize; `taken`, how many scripts sbatch
    takes; `prints`, what it says of them (ID: the job); `hangs`, which of sbatch, squeue (once) and scontrol (sinfo, too) never
    answers; `script`, the last that sbatch took; `asked`, what was asked of squeue and scontrol, and how long the queue was at
    each sbatch; `scripts`."""

    folder: Path

    def put(self, **files: object) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(f"{text}\n" if text != "" else "")

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


def stand_ins(folder: Path) -> StandIns:
    """Of a new folder, whose `bin` is for PATH."""
    (folder / "bin").mkdir(parents=True)
    programs = {"sbatch": _SBATCH, "squeue": _SQUEUE, "scontrol": _SCONTROL, "sinfo": _SINFO, "srun": ""}
    for name, text in programs.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nF="{folder}"\n{text}')
        program.chmod(0o755)
    made = StandIns(folder)
    made.put(queue="", ends="no", silent=0, state="RUNNING", largest=1001, taken=9, asked="", scripts="")
    made.put(prints="Submitted batch job ID", hangs="", script="")
    return made
