"""Makes tests/data/unread: small models of formats that are named and not read, each written by its own library.

    pip install tensorflow-cpu==2.21.0 onnx==1.23.2 gguf==0.19.0 flax==0.12.8 joblib==1.6.0 coremltools==9.0
    python tests/data/make/saved_model.py
    python tests/data/make/unread_files.py

The TensorFlow Lite file is made from tests/data/saved_model.
"""

from pathlib import Path

import coremltools
import flax.serialization
import gguf
import joblib
import numpy as np
import onnx
import tensorflow as tf

DATA = Path(__file__).resolve().parent.parent
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def write_onnx(path: Path) -> None:
    weight = onnx.numpy_helper.from_array(WEIGHT, "w")
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
    value = onnx.helper.make_tensor_value_info
    x, y = value("x", onnx.TensorProto.FLOAT, [1, 2]), value("y", onnx.TensorProto.FLOAT, [1, 3])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "linear", [x], [y], [weight])), path)


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", WEIGHT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_coreml(path: Path) -> None:
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

    builder = NeuralNetworkBuilder([("x", datatypes.Array(2))], [("y", datatypes.Array(3))])
    builder.add_inner_product("fc", WEIGHT.T, None, 2, 3, False, "x", "y")
    coremltools.models.utils.save_spec(builder.spec, str(path))


def main() -> None:
    folder = DATA / "unread"
    folder.mkdir(exist_ok=True)
    write_onnx(folder / "model.onnx")
    write_gguf(folder / "model.gguf")
    write_coreml(folder / "model.mlmodel")
    (folder / "model.msgpack").write_bytes(flax.serialization.to_bytes({"params": {"w": WEIGHT}}))
    joblib.dump({"w": WEIGHT}, folder / "model.joblib")
    lite = tf.lite.TFLiteConverter.from_saved_model(str(DATA / "saved_model"))
    (folder / "model.tflite").write_bytes(lite.convert())


if __name__ == "__main__":
    main()
