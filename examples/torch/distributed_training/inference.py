"""What the training has learned: the network cut over any number of ranks, from the checkpoint of any other.

    CHECKPOINTS=ckpt bash run_msrun.sh DATA_PATH 8                                      # trains and saves
    msrun --worker_num=4 --env CHECKPOINTS=ckpt inference.py accuracy                   # over the test images
    msrun --worker_num=4 --env CHECKPOINTS=ckpt --env PORT=8080 inference.py serve      # answers requests on rank 0
    msrun --worker_num=1 --env CHECKPOINTS=ckpt inference.py export resnet50.pt         # for plain torch

A request: `curl --data-binary @image.bin localhost:8080` with the 3072 bytes of a CIFAR-10 image.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import torch
import torch.distributed as dist
from cifar import create_dataset, data_path
from resnet import resnet50

from msrun.data import vision
from msrun.mindspore import Model, context, load_checkpoint, load_param_into_net, nn
from msrun.mindspore.communication import get_group_size, get_rank, init
from msrun.runtime import latest_checkpoint

DAYS_S = 30 * 24 * 3600.0
TRANSFORMS = (
    vision.Resize((int(os.getenv("IMAGE_SIZE", "224")),) * 2),
    vision.Rescale(1.0 / 255.0, 0.0),
    vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)),
    vision.HWC2CHW(),
)


def cut_network():
    """Return ResNet-50 with the widest layers cut over all ranks, another layout than that of the training."""
    net = resnet50()
    parts = get_group_size()
    for block in net.layer4:
        block.conv2.shard(((1, 1, 1, 1), (parts, 1, 1, 1)))  # each rank computes its part of the channels
    return net


def load_model():
    """Return the trained network behind a Model."""
    context.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True, compat="torch")
    net = cut_network()
    model = Model(net, loss_fn=nn.CrossEntropyLoss(), metrics={"accuracy"})
    newest = latest_checkpoint(os.getenv("CHECKPOINTS", "checkpoints"))
    if newest is None:
        sys.exit("inference.py: no checkpoint in CHECKPOINTS; train first, with the same variable")
    load_param_into_net(net, load_checkpoint(newest))
    return model


def classify(model, image):
    """Return the class of one image of 3072 bytes, colours in planes, as CIFAR-10 has them."""
    pixels = np.frombuffer(image, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0)
    for transform in TRANSFORMS:
        pixels = transform(pixels)
    return int(model.predict(torch.from_numpy(np.ascontiguousarray(pixels))[None]).argmax())


def serve(model):
    """Answer requests on rank 0; the other ranks compute their parts."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            image = self.rfile.read(int(self.headers["Content-Length"]))
            is_image = len(image) == 3072
            if is_image:
                dist.broadcast_object_list([image])
            answer = {"class": classify(model, image)} if is_image else {"error": "an image has 3072 bytes"}
            self.send_response(200 if is_image else 400)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    if get_rank() == 0:
        server = HTTPServer(("127.0.0.1", int(os.getenv("PORT", "8080"))), Answer)
        print("answering on port", server.server_port, flush=True)
        server.serve_forever()
    while True:
        request = [None]
        dist.broadcast_object_list(request)
        classify(model, request[0])


def main(task, *words):
    init(timeout_s=DAYS_S)  # requests may be far apart
    if task == "export":
        net = resnet50()
        load_param_into_net(net, load_checkpoint(latest_checkpoint(os.getenv("CHECKPOINTS", "checkpoints"))))
        torch.save(net.state_dict(), words[0])
        print("saved", words[0])
        return
    model = load_model()
    if task == "serve":
        serve(model)
    print("accuracy:", model.eval(create_dataset(data_path(), batch_size=16, usage="test", whole=True))["accuracy"])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["accuracy"]))
