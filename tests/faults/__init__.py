"""Kills, signals, full disks, strangers' files and states that look healthy, for real.

    python -m tests.faults
    python -m tests.faults --kills 12 --only kills
    python -m tests.faults --only 'signals_(dpo|score)|data'

Every try is of `jaxmem` in processes of its own, and what it leaves in the end is
compared, bit by bit, with what one leaves that nothing disturbed: steps, documents and
all arrays of the saved weights. `--only` takes sections by a pattern of their names,
which `--list` prints. A kill takes about eight seconds of one core, of eval twenty; two
sections run side by side, and all take about half an hour. The script prints what was
lost and what was said, and writes that to benchmarks/results/faults_cpu.csv, of
which `--table` prints the table of docs/reliability.md.
Mounting a disk to fill it needs root, and is skipped by name elsewhere; so is eval
without lm-eval. Tries without the compilation cache compile as a new machine does.
"""
