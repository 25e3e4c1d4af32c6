"""From logits to text: sessions over a bounded cache, sampling, detokenising, chat."""
