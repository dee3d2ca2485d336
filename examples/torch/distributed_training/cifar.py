"""The data of the example: CIFAR-10 as MindSpore's document reads it, in parts of ranks."""

import os
from pathlib import Path

import msrun.mindspore.dataset.transforms.c_transforms as C
import msrun.mindspore.dataset.vision.c_transforms as vision

import msrun.mindspore.dataset as ds
from msrun.data import write_digits_as_cifar10
from msrun.mindspore import dtype as mstype
from msrun.mindspore.communication import get_group_size, get_rank


def data_path():
    """Return DATA_PATH, a folder with CIFAR-10's files; without it handwritten digits in their format."""
    return os.getenv("DATA_PATH") or write_digits_as_cifar10(Path(__file__).parent.parent / "data" / "cifar10_digits")


def create_dataset(path, repeat_num=1, batch_size=32, usage="train", whole=False):
    """Return the data of this rank: step k of all ranks together is step k of one process with a larger batch.

    whole: every rank reads all of it.
    """
    resize_height = resize_width = int(os.getenv("IMAGE_SIZE", "224"))
    rescale = 1.0 / 255.0
    shift = 0.0

    # get rank_id and rank_size
    rank_id = get_rank()
    rank_size = get_group_size()
    if whole:
        rank_id, rank_size = 0, 1
    samples = int(os.environ["SAMPLES"]) if "SAMPLES" in os.environ else None
    data_set = ds.Cifar10Dataset(path, usage, num_samples=samples, num_shards=rank_size, shard_id=rank_id)

    # define map operations
    random_crop_op = vision.RandomCrop((32, 32), (4, 4, 4, 4))
    random_horizontal_op = vision.RandomHorizontalFlip()
    resize_op = vision.Resize((resize_height, resize_width))
    rescale_op = vision.Rescale(rescale, shift)
    normalize_op = vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023))
    changeswap_op = vision.HWC2CHW()
    type_cast_op = C.TypeCast(mstype.int32)

    c_trans = [random_crop_op, random_horizontal_op] if usage == "train" else []
    c_trans += [resize_op, rescale_op, normalize_op, changeswap_op]

    # apply map operations on images
    data_set = data_set.map(operations=type_cast_op, input_columns="label")
    data_set = data_set.map(operations=c_trans, input_columns="image")

    # apply shuffle operations
    if usage == "train":
        data_set = data_set.shuffle(buffer_size=10)

    # apply batch operations
    data_set = data_set.batch(batch_size=batch_size, drop_remainder=True)

    # apply repeat operations
    return data_set.repeat(repeat_num)
