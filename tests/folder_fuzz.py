"""Mutates copies of a folder, in a process with little memory, and lets only our errors out.

FUZZ prints how many folders were served to the last tensor; LISTING, how many could be opened at all.
"""

FUZZ = """
import random, shutil
from pathlib import Path
import numpy as np
import evergrad as eg
source, work, count, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
listed = served = 0
for number in range(count):
    target = work / str(number)
    shutil.copytree(source, target)
    files = sorted(f for f in target.rglob("*") if f.is_file())
    victim = random.choice(files)
    data = bytearray(victim.read_bytes())
    for _ in range(random.choice([1, 1, 2, 8])):
        at = random.randrange(len(data) or 1)
        kind = random.randrange(6)
        if kind == 0 and data: data[at] ^= 1 << random.randrange(8)
        elif kind == 1: data[at:at + 1] = random.randbytes(1)
        elif kind == 2: data[at:at + 4] = random.choice([b"\\xff\\xff\\xff\\xff", bytes(4), b"\\xff\\xff\\xff\\x7f"])
        elif kind == 3: del data[at:at + random.choice([1, 8, 200])]
        elif kind == 4: data[at:at] = random.randbytes(random.choice([1, 4, 32]))
        else: del data[at:]
    chance = random.random()
    if chance < 0.05: victim.unlink()
    elif chance < 0.1: victim.write_bytes(random.choice(files).read_bytes())
    else: victim.write_bytes(data)
    signal.alarm(20)
    try:
        with eg.open_checkpoint(target) as ck:
            listed += 1
            for name, info in ck.tensors.items():
                try:
                    ck.read_bits(name)
                except eg.EvergradError as error:
                    assert str(error) and "\\n" not in str(error)
                if info.numel:
                    shape = (1, info.dtype.parts) if info.dtype.parts > 1 else 1
                    ck.xor(name, [info.numel - 1], np.zeros(shape, info.dtype.bits))
                ck.checksum(name)
            ck.container_checks()
            ck.skeleton.dumps()
            served += 1
    except eg.EvergradError as error:
        assert str(error) and "\\n" not in str(error), repr(str(error))
    shutil.rmtree(target)
print(served)
"""

LISTING = FUZZ.replace("print(served)", "print(listed)")
