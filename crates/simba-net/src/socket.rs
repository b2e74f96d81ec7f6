//! Writes that do not wait.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{SendFlags, send};

/// A second handle on a plain connection: whoever has something to send while nothing else is under way sends it
/// himself, instead of asking the task that owns the connection.
///
/// The connection stays open for as long as one of its handles does.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Another handle on this connection.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub fn of(connection: impl AsFd) -> io::Result<Self> {
        connection.as_fd().try_clone_to_owned().map(Self)
    }

    /// Sends what fits into the kernel's buffer at this moment, and says how much that was: nothing, too, if the
    /// connection is broken, which its owner finds out when he reads.
    #[must_use]
    pub fn send(&self, bytes: &[u8]) -> usize {
        send(&self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_sent_arrives_in_order_and_a_full_buffer_makes_nobody_wait() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = Socket::of(&ours).unwrap();
        let (piece, mut sent) = (vec![7; 1 << 16], 0);
        loop {
            match socket.send(&piece) {
                0 => break,
                some => sent += some,
            }
        }
        drop((socket, ours));
        let mut heard = Vec::new();
        theirs.read_to_end(&mut heard).unwrap();
        assert_eq!(heard, vec![7; sent]);
    }

    #[test]
    fn a_broken_connection_takes_nothing_and_ends_nobody() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = Socket::of(&ours).unwrap();
        drop(theirs);
        assert_eq!(socket.send(b"hello"), 0);
    }
}
