"""What a bounded cache costs in quality: perplexity, agreement with the full cache, retrieval of facts from long texts."""
