"""Shapes of the models in Varuna's evaluation, and the operations and bytes that follow from a shape.

A transformer layer of hidden size h does 24 h^2 floating-point operations per token in its matrices and 4 s h in
attention over s tokens (two per multiplication and addition); the head does 2 h V for V words. The backward takes
twice the forward (Varuna, figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_BYTES = 2
"""Parameters and what crosses a cut-point are 16-bit floats (Varuna, section 3.1)."""


@dataclass(frozen=True)
class Transformer:
    """One model and its job.

    Args:
        title: As the papers call it.
        num_layers: L.
        hidden: h.
        num_heads: Of the attention; counts for activation memory alone.
        sequence: s, tokens per sample.
        vocabulary: V; the embedding is tied to the head.
        batch_size: Global batch M, samples.
        sources: Where each of these comes from.
    """

    title: str
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    vocabulary: int
    batch_size: int
    sources: dict[str, str]

    @property
    def layer_parameters(self) -> int:
        """12 h^2 in the matrices, 13 h in biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def tied_parameters(self) -> int:
        """Word embedding, which is the head's matrix too."""
        return self.vocabulary * self.hidden

    @property
    def position_parameters(self) -> int:
        """Position embedding, in the first section only."""
        return self.sequence * self.hidden

    @property
    def norm_parameters(self) -> int:
        """Last layer norm, in the head's section only."""
        return 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        """All, the tied ones once."""
        own = self.num_layers * self.layer_parameters + self.position_parameters + self.norm_parameters
        return own + self.tied_parameters

    @property
    def layer_flops(self) -> int:
        """Forward of one layer, per sample."""
        return self.sequence * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    @property
    def head_flops(self) -> int:
        """Forward of the head, per sample."""
        return self.sequence * 2 * self.hidden * self.vocabulary

    @property
    def useful_flops(self) -> int:
        """Per sample and step, as Varuna counts them: 6 per parameter and token, no recompute, no attention."""
        return 6 * self.num_parameters * self.sequence

    @property
    def boundary_bytes(self) -> int:
        """What crosses a cut-point, and is stored for the recompute, per sample: s h 16-bit floats."""
        return self.sequence * self.hidden * HALF_BYTES

    @property
    def layer_activation_bytes(self) -> int:
        """Held between forward and backward of one layer, per sample: s h (34 + 5 heads s / h)."""
        return 34 * self.sequence * self.hidden + 5 * self.num_heads * self.sequence**2

    @property
    def head_activation_bytes(self) -> int:
        """Norm and logits (16-bit) with their softmax (32-bit), per sample."""
        return self.boundary_bytes + self.sequence * self.vocabulary * (HALF_BYTES + 4)

    def uniform_boundaries(self, num_stages: int) -> tuple[int, ...]:
        """First section of each stage when every stage has L / P layers, as Varuna maps them (section 4.4).

        The embedding (section 0) goes with the first layers, the head (section L + 1) with the last.

        Raises:
            ValueError: P does not divide L.
        """
        share, rest = divmod(self.num_layers, num_stages)
        if rest:
            raise ValueError(f"{num_stages} stages do not divide {self.num_layers} layers")
        return (0, *(1 + stage * share for stage in range(1, num_stages)))


MODELS: dict[str, Transformer] = {
    "gpt2-2.5b": Transformer(
        title="GPT-2 2.5B",
        num_layers=54,
        hidden=1920,
        num_heads=20,
        sequence=1024,
        vocabulary=50257,
        batch_size=8192,
        sources={
            "num_layers": "Varuna 3.1, observation 1: 54 layers",
            "hidden": "Varuna 3.1, observation 1: hiddenSize of 1920",
            "num_heads": "Megatron-LM (Shoeybi et al. 2019), table 1: 20 heads (the Megatron model that Varuna 7 uses)",
            "sequence": "Varuna 3.1, observation 1: sequenceLength of 1024",
            "vocabulary": "GPT-2 (Radford et al. 2019): 50,257 words",
            "batch_size": "Varuna 7.1.1 and figure 9: mini-batch size 8192",
        },
    ),
    "gpt2-8.3b": Transformer(
        title="GPT-2 8.3B",
        num_layers=72,
        hidden=3072,
        num_heads=32,
        sequence=1024,
        vocabulary=50257,
        batch_size=8192,
        sources={
            "num_layers": "Varuna 7.1.2: 18 stages of 4 transformer layers",
            "hidden": "derived: 8.3 billion parameters in 72 layers; Megatron-LM, table 1, has the same 3072",
            "num_heads": "Megatron-LM (Shoeybi et al. 2019), table 1: 32 heads",
            "sequence": "Varuna 3.1, observation 1, says 1024 of the 2.5B model; taken for this one too",
            "vocabulary": "GPT-2 (Radford et al. 2019): 50,257 words",
            "batch_size": "Varuna 7.1.1: mini-batch size of 8192",
        },
    ),
    "bert-large": Transformer(
        title="BERT-large",
        num_layers=24,
        hidden=1024,
        num_heads=16,
        sequence=512,
        vocabulary=30522,
        batch_size=32768,
        sources={
            "num_layers": "BERT (Devlin et al. 2018): 24 layers (Varuna 7: 340 million parameters)",
            "hidden": "BERT (Devlin et al. 2018): hidden size 1024",
            "num_heads": "BERT (Devlin et al. 2018): 16 heads",
            "sequence": "Varuna 7.1.1, BERT-large: sequence length of 512",
            "vocabulary": "BERT (Devlin et al. 2018): 30,522 word pieces",
            "batch_size": "Varuna 7.1.1, BERT-large: batch size of 32K",
        },
    ),
    "bert-72": Transformer(
        title="BERT-72",
        num_layers=72,
        hidden=1024,
        num_heads=16,
        sequence=128,
        vocabulary=30522,
        batch_size=8192,
        sources={
            "num_layers": "Varuna 7.1.2: 72 layers",
            "hidden": "Varuna 7.1.2: hidden size of 1024",
            "num_heads": "BERT (Devlin et al. 2018): 16 heads for this hidden size",
            "sequence": (
                "derived: BERT's own first phase has 128 tokens; with 512, the 41.8 examples/s/GPU of Varuna's table 5 "
                "would be more than the GPU's peak"
            ),
            "vocabulary": "BERT (Devlin et al. 2018): 30,522 word pieces",
            "batch_size": "Varuna table 5: mini-batch size of 8192",
        },
    ),
}
