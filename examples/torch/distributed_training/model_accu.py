"""A Model whose training steps take several batches."""

from cell_wrapper import TrainClear, TrainForwardBackward, TrainOptim

from msrun.mindspore import Model


class Model_ACCU(Model):
    """`train(mini_steps, epoch, dataset)`: the optimizer steps once for `mini_steps` batches."""

    def train(self, mini_steps, epoch, train_dataset, per_print_times=1):
        forward_backward = TrainForwardBackward(self.train_network, mini_steps)
        optim, clear = TrainOptim(self.optimizer), TrainClear(self.optimizer)
        self.train_network.train()
        for number in range(1, epoch + 1):
            total = 0.0
            for index, batch in enumerate(train_dataset, 1):
                is_last = index % mini_steps == 0
                total += float(forward_backward(*batch, is_last=is_last)) / mini_steps
                if is_last:
                    optim()
                    clear()
                    if index // mini_steps % per_print_times == 0:
                        print(f"epoch: {number} step: {index // mini_steps}, loss is {total}", flush=True)
                    total = 0.0
