"""Ray Train: TorchTrainer on two workers, which fail once and are started again from a checkpoint."""

from environments import same_as_stock


def test_torch_trainer(tmp_path):
    same_as_stock("ray", "ray_train", tmp_path, torchrun=False)
