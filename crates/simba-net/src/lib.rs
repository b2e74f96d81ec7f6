//! Sockets and TLS for the networked backends of Simba.
