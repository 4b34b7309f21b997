"""The certificate: proves each hook on the loaded model before traffic."""
