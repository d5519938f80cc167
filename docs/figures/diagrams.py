"""The diagrams of the documentation: `python docs/figures/diagrams.py` writes `diagram-*.svg` beside itself."""

from __future__ import annotations

from pathlib import Path

from drawing import BLUE, GREEN, GREY, LINE, ORANGE, PURPLE, SOFT, Drawing

__all__ = ["DIAGRAMS", "checkpointing", "formats", "injection", "recovery", "study"]


def checkpointing() -> Drawing:
    """One copy by the trainer; digests, disk and storage by the agent."""
    d = Drawing(366, "A save: the trainer copies into an arena, the agent digests it and brings it to every tier")
    for y, h, name in ((14, 62, "trainer"), (92, 76, "agent"), (184, 92, "tiers")):
        d.band(8, y, 784, h)
        d.text(18, y + 19, name, size=13, bold=True, ink=SOFT)
    d.box(92, 26, 66, 38, "step 119")
    d.box(164, 26, 66, 38, "step 120")
    d.box(236, 26, 110, 38, ("save", "one copy"), ORANGE)
    for x, step in ((352, 121), (424, 122), (496, 123), (568, 124)):
        d.box(x, 26, 66, 38, f"step {step}")
    d.text(644, 50, "training goes on")
    d.box(130, 104, 92, 52, ("digest", "each tensor"), BLUE)
    d.box(372, 104, 150, 52, ("write, fsync", "the manifest last"), BLUE)
    d.box(600, 104, 176, 52, ("upload in parts", "while saves go on"), BLUE)
    d.box(92, 200, 254, 60, ("memory: the arena", "/dev/shm, laid out as the file"), GREEN)
    d.box(372, 200, 190, 60, ("local: a shard file", "and its manifest"), GREEN)
    d.box(588, 200, 196, 60, ("persistent: S3, a share", "COMMIT.json last of all"), GREEN)
    d.arrow((291, 64), (291, 199), ink=LINE[ORANGE])
    d.arrow((176, 200), (176, 157))
    d.arrow((222, 130), (371, 130))
    d.arrow((447, 156), (447, 199))
    d.arrow((522, 130), (599, 130))
    d.arrow((688, 156), (688, 199))
    for x, w, lines in (
        (92, 254, ("outlives trainer and agent,", "not a reboot")),
        (372, 190, ("outlives a reboot,", "not the disk")),
        (588, 196, ("outlives the nodes",)),
    ):
        for number, line in enumerate(lines):
            d.text(x + w / 2, 296 + 16 * number, line, anchor="middle", ink=SOFT)
    d.text(
        400,
        346,
        "Whoever is killed, and when: the next agent or trainer finds what was captured, and finishes it.",
        anchor="middle",
    )
    return d


def recovery() -> Drawing:
    """A rank dies in a step; the others report, get a plan, and do the step again with a spare in its place."""
    d = Drawing(372, "A rank dies in step 10; survivors report, the launcher plans, a spare joins")
    d.band(92, 12, 282, 292)
    d.band(560, 12, 232, 292, "#e6f4ee")
    d.text(233, 30, "generation 0", size=13, bold=True, anchor="middle", ink=SOFT)
    d.text(467, 30, "within the step", size=13, bold=True, anchor="middle", ink=SOFT)
    d.text(676, 30, "generation 1", size=13, bold=True, anchor="middle", ink=SOFT)
    lanes = {"rank 0": 42, "rank 1": 82, "rank 2": 122, "rank 3": 162, "spare 4": 208}
    for name, y in lanes.items():
        d.text(14, y + 20, name, size=13, bold=True)
    for name, y in lanes.items():
        if name == "spare 4":
            d.box(102, y, 386, 30, "runs the script up to its first batch, and waits")
            continue
        d.box(102, y, 84, 30, "step 9", BLUE)
        d.box(192, y, 100 if name == "rank 2" else 150, 30, "step 10", ORANGE)
        if name != "rank 2":
            d.box(384, y, 70, 30, "report", PURPLE)
            d.box(570, y, 122, 30, "step 10 again", BLUE)
            d.box(698, y, 84, 30, "step 11", BLUE)
            d.arrow((454, y + 15), (569, y + 15))
    d.cross(304, 137)
    d.text(318, 142, "dies")
    d.box(570, 122, 122, 30, "step 10 again", GREEN)
    d.box(698, 122, 84, 30, "step 11", GREEN)
    d.text(676, 229, "spare 4 is rank 2 now", anchor="middle")
    d.arrow((488, 223), (530, 223), (530, 143), (569, 143), ink=LINE[GREEN])
    d.arrow((510, 57), (510, 130), (569, 130), ink=LINE[GREEN], dashed=True)
    d.text(14, 277, "launcher", size=13, bold=True)
    d.box(102, 256, 284, 36, "hears who died, and who is silent")
    d.box(398, 256, 150, 36, "plan: who does what", PURPLE)
    d.arrow((419, 192), (419, 207), ink=LINE[PURPLE], head=False, dashed=True)
    d.arrow((419, 238), (419, 255), ink=LINE[PURPLE], dashed=True)
    d.arrow((548, 274), (580, 274), (580, 193), ink=LINE[PURPLE], dashed=True)
    d.text(
        400,
        326,
        "Green: the state comes from a survivor, what only rank 2 had from its neighbour. Nothing is read from a disk.",
        anchor="middle",
    )
    d.text(
        400,
        348,
        "Without a spare the step is dealt to those who are left: no sample is left out, none is used twice.",
        anchor="middle",
    )
    return d


def injection() -> Drawing:
    """From a name and a seed to changed bytes, and back."""
    d = Drawing(356, "An injection is drawn, rehearsed and logged before the first byte changes")
    d.box(14, 20, 170, 58, ("a checkpoint", "any format, or live"), GREEN)
    d.box(222, 20, 166, 58, ("what may be hit", "where, types, roles"), BLUE)
    d.box(426, 20, 166, 58, ("sites", "count, rate; the seed"), BLUE)
    d.box(630, 20, 156, 58, ("old and new bits", "of each number hit"), BLUE)
    d.arrow((184, 49), (221, 49))
    d.arrow((388, 49), (425, 49))
    d.arrow((592, 49), (629, 49))
    d.arrow((708, 78), (708, 101))
    d.box(630, 102, 156, 58, ("rehearse", "which bytes change"), BLUE)
    d.box(426, 102, 166, 58, ("write the log", "durable: file, folder"), ORANGE)
    d.box(222, 102, 166, 58, ("change the bytes", "and their checksums"), ORANGE)
    d.box(14, 102, 170, 58, ("faulty checkpoint", "loads without a word"), PURPLE)
    d.arrow((630, 131), (593, 131))
    d.arrow((426, 131), (389, 131))
    d.arrow((222, 131), (185, 131))
    d.arrow((99, 101), (99, 79), ink=LINE[GREEN], dashed=True)
    d.text(108, 95, "undo: byte for byte", ink=LINE[GREEN])
    d.arrow((509, 160), (509, 190), (388, 190), dashed=True)
    d.box(186, 174, 200, 34, "replay in another file", GREY)
    d.text(14, 244, "path → tensor → element → bit:", bold=True, size=13)
    d.text(254, 244, "model/4.weight[1,63] bit 1 (exponent msb): 0.8265 → 2.812e+38", size=13)
    d.bits(14, 260, [PURPLE] + [ORANGE] * 8 + [BLUE] * 23, marked=1)
    d.text(14, 310, "sign", ink=LINE[PURPLE])
    d.text(54, 310, "exponent: its top bit hurts", ink=LINE[ORANGE])
    d.text(508, 310, "mantissa", anchor="middle", ink=LINE[BLUE])
    d.text(
        400,
        342,
        "A kill at any point leaves the old file, or one whose every touched byte the log undoes.",
        anchor="middle",
    )
    return d


def study() -> Drawing:
    """One training without a fault, many with; what differs, as rates with intervals."""
    d = Drawing(382, "A study: trials go on from the golden run's checkpoint with faults, and are compared with it")
    d.band(8, 12, 560, 226)
    d.text(20, 31, "trainings: one golden run, many trials", size=13, bold=True, ink=SOFT)
    d.box(20, 44, 110, 44, ("train", "some epochs"), BLUE)
    d.box(160, 44, 110, 44, ("checkpoint", "made once"), GREEN)
    d.box(310, 44, 246, 44, ("golden run", "trained on, without a fault"), GREEN)
    d.arrow((130, 66), (159, 66))
    d.arrow((270, 66), (309, 66))
    for number, y in enumerate((104, 150, 196)):
        d.box(194, y, 94, 34, f"flip, seed {number + 1}", ORANGE)
        d.box(310, y, 246, 34, f"trial {number + 1}: trained on, likewise", BLUE)
        d.arrow((288, y + 17), (309, y + 17))
    d.arrow((178, 88), (178, 121), (193, 121))
    d.arrow((178, 121), (178, 167), (193, 167))
    d.arrow((178, 167), (178, 213), (193, 213))
    d.text(20, 140, "one bit or 1000,")
    d.text(20, 157, "in weights, layers,")
    d.text(20, 174, "optimizer state;")
    d.text(20, 191, "one rank or all")
    d.box(600, 44, 190, 44, ("observed", "after every step:"), PURPLE)
    for number, line in enumerate(("loss", "largest number in the state", "distance from golden", "metric, by epoch")):
        d.text(606, 110 + 17 * number, line)
    d.arrow((556, 66), (599, 66))
    d.arrow((556, 121), (578, 121), (578, 78), (599, 78))
    d.arrow((556, 167), (578, 167), (578, 121), head=False)
    d.arrow((556, 213), (578, 213), (578, 167), head=False)
    d.box(14, 262, 150, 52, ("plan", "axes × values, TOML"), GREY)
    d.box(194, 262, 150, 52, ("executor", "cores, Dask, Slurm"), GREY)
    d.box(374, 262, 176, 52, ("journal", "a line a trial, durable"), GREY)
    d.box(580, 262, 210, 52, ("outcomes, then rates", "tables with intervals"), GREY)
    d.arrow((164, 288), (193, 288))
    d.arrow((344, 288), (373, 288))
    d.arrow((550, 288), (579, 288))
    d.arrow((269, 262), (269, 240), dashed=True)
    d.arrow((695, 172), (695, 250), (462, 250), (462, 261), dashed=True)
    d.text(
        400,
        340,
        "Outcome: the first that applies of nev (NaN, ∞, extreme), failed, degraded, changed, identical.",
        anchor="middle",
    )
    d.text(
        400,
        362,
        "Killed at any time, the same command runs what the journal lacks. Every trial can be replayed, to the bit.",
        anchor="middle",
    )
    return d


def formats() -> Drawing:
    """Every format as one address space, and what is done with it."""
    d = Drawing(270, "Every checkpoint format becomes path, tensor, element and bit, on which all tools work")
    rows = (
        "torch · Lightning",
        "safetensors",
        "HDF5 · Keras · Chainer",
        "TensorFlow",
        "DCP · DeepSpeed",
        "npz · npy · versions",
    )
    for number, words in enumerate(rows):
        d.box(14, 16 + 38 * number, 180, 30, words, GREEN)
        d.arrow((194, 31 + 38 * number), (216, 31 + 38 * number), (240, 122), head=False)
    d.arrow((240, 122), (263, 122))
    d.box(
        264,
        62,
        250,
        120,
        (
            "path → tensor → element → bit",
            "model/fc.weight [3] bit 1",
            "shape, type, role, where its",
            "bytes are, which checksum",
            "no code of the file is run",
        ),
        BLUE,
    )
    verbs = (
        "inspect: what is in it",
        "verify: is it sound",
        "diff, match: what differs",
        "convert: exact or refused",
        "inject, undo, replay",
        "your own: read, xor",
    )
    for number, words in enumerate(verbs):
        d.box(594, 16 + 38 * number, 192, 30, words, ORANGE)
        d.arrow((514, 122), (552, 31 + 38 * number), (593, 31 + 38 * number))
    d.text(400, 256, "Bits are altered in place, and the container's checksums follow.", anchor="middle")
    return d


DIAGRAMS = {
    "checkpointing": checkpointing,
    "recovery": recovery,
    "injection": injection,
    "study": study,
    "formats": formats,
}


if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        target = Path(__file__).resolve().parent / f"diagram-{name}.svg"
        target.write_text(draw().svg(), "utf-8")
        print(target)
