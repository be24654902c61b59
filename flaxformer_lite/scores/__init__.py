"""Parts of scores: error rates of symbols, groups, resampling; utilities, reranking."""
