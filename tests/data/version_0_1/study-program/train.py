import json
import sys
from array import array
from pathlib import Path

head, numbers = (data := Path(sys.argv[1]).read_bytes())[:128], array("f", data[128:])
for epoch in range(2):
    numbers = array("f", [n * 0.5 for n in numbers])
    total = sum(numbers)
    print(json.dumps({"epoch": epoch, "loss": total, "accuracy": max(0.0, 1 - abs(total - 4) / 100)}))
Path(sys.argv[2]).write_bytes(head + numbers.tobytes())
