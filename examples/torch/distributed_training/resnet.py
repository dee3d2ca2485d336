"""ResNet-50 (He et al., 2015) in MindSpore's words; every layer is a torch module."""

from msrun.mindspore import nn, ops


def conv(in_channel, out_channel, kernel_size, stride=1):
    return nn.Conv2d(in_channel, out_channel, kernel_size, stride, pad_mode="same", weight_init="he_normal")


class ResidualBlock(nn.Cell):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    expansion = 4

    def __init__(self, in_channel, out_channel, stride=1):
        super().__init__()
        channel = out_channel // self.expansion
        self.conv1 = conv(in_channel, channel, 1)
        self.bn1 = nn.BatchNorm2d(channel)
        self.conv2 = conv(channel, channel, 3, stride)
        self.bn2 = nn.BatchNorm2d(channel)
        self.conv3 = conv(channel, out_channel, 1)
        self.bn3 = nn.BatchNorm2d(out_channel, gamma_init=0)
        self.relu = nn.ReLU()
        self.add = ops.Add()
        self.down_sample = None
        if stride != 1 or in_channel != out_channel:
            self.down_sample = nn.SequentialCell(conv(in_channel, out_channel, 1, stride), nn.BatchNorm2d(out_channel))

    def construct(self, x):
        shortcut = x if self.down_sample is None else self.down_sample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(self.add(out, shortcut))


class ResNet(nn.Cell):
    """Four groups of blocks between a 7x7 convolution and a dense layer."""

    def __init__(self, block, layer_nums, out_channels, num_classes, head):
        super().__init__()
        self.conv1 = conv(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        in_channel, groups = 64, []
        for index, (count, out_channel) in enumerate(zip(layer_nums, out_channels, strict=True)):
            blocks = []
            for number in range(count):
                blocks.append(block(in_channel, out_channel, 2 if index and not number else 1))
                in_channel = out_channel
            groups.append(nn.SequentialCell(blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.mean = ops.ReduceMean(keep_dims=True)
        self.flatten = nn.Flatten()
        self.end_point = head(in_channel, num_classes)

    def construct(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.flatten(self.mean(x, (2, 3)))
        return self.end_point(x)


def dense_head(in_channel, num_classes):
    return nn.Dense(in_channel, num_classes, weight_init="xavier_uniform", bias_init="zeros")


def resnet50(batch_size=32, num_classes=10, head=dense_head):
    """Return ResNet-50; batch_size is MindSpore's argument, without effect.

    head: makes the last layer, (n, in_channel) -> (n, num_classes).
    """
    del batch_size
    return ResNet(ResidualBlock, [3, 4, 6, 3], [256, 512, 1024, 2048], num_classes, head)
