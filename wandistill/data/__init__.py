"""What a student trains on: prompts or captioned images, prompt embeddings, latents, and their caches on disk."""
