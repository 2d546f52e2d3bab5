"""Rows of Parquet files, which the plain loop reads from one file to the next."""

import pathlib

import pyarrow
import pyarrow.parquet
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import morph
from morph.data.streams import Parquet, Stream

FOLDER = pathlib.Path("rows")


def write(folder):
    folder.mkdir()
    x = torch.randn(4, 60, 8, generator=torch.Generator().manual_seed(2))
    for number, rows in enumerate(x):
        table = pyarrow.table({"x": rows.tolist(), "y": (rows.sum(1) > 0).long().tolist()})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet")


def sample(row):
    return {"x": torch.tensor(row["x"]), "y": torch.tensor(row["y"])}


class Rows(Dataset):
    """All rows, one file after the other."""

    def __init__(self, folder=FOLDER):
        files = sorted(folder.glob("*.parquet"))
        self.rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return sample(self.rows[i])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def loss(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def train(batches):
    net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
    return net


def job(folder=FOLDER):
    return morph.Job(
        name="shards",
        model=model,
        loss=loss,
        batch_size=16,
        dataset=lambda: Stream(Parquet(f"{folder}/*.parquet"), sample),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )


if __name__ == "__main__":
    write(FOLDER)
    torch.save(train(DataLoader(Rows(), 16, shuffle=True)).state_dict(), "shards.pt")
