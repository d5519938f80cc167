"""Makes tests/data/lightning.ckpt: what Lightning's own ModelCheckpoint saves after two epochs.

    pip install torch==2.13.0 lightning==2.6.6 safetensors==0.8.0
    python tests/data/make/lightning_ckpt.py

The hyperparameters hold an AttributeDict, so that the pickle names a class of Lightning.
(A script called lightning.py would hide the package of that name.)
"""

import shutil
import tempfile

import lightning
import torch
from expect import DATA, tensors_of_pickle, write_expected
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, features: int, classes: int, optim: AttributeDict) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.optim.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=self.hparams.optim.step_size)]


def main() -> None:
    lightning.seed_everything(0)
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(3, (32,))), batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(dirpath=folder, monitor="loss")
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[checkpoint],
            default_root_dir=folder,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=2,
        )
        trainer.fit(Classifier(8, 3, AttributeDict(lr=1e-2, step_size=1)), data)
        shutil.copyfile(checkpoint.best_model_path, DATA / "lightning.ckpt")
    write_expected("lightning", tensors_of_pickle(DATA / "lightning.ckpt"))


if __name__ == "__main__":
    main()
