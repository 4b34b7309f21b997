"""The certificate's requests, and the comparison with transformers."""
