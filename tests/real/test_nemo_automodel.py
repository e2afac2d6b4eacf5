"""NeMo Automodel: its recipe for fine-tuning, whose parallelizer calls fully_shard."""

from environments import same_as_stock


def test_recipe(tmp_path):
    same_as_stock("nemo_automodel", "nemo_automodel_recipe", tmp_path)
