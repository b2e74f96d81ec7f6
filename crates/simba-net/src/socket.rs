//! A second handle to a connection: writes that do not block, and a reset instead of a graceful close.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendFlags, send};
use socket2::SockRef;

/// A second handle to a plain connection. A caller with a request uses it to send directly while nothing else is in
/// flight, instead of passing the request to the task that owns the connection.
///
/// The connection stays open while one of its handles is open.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Creates another handle to this connection.
    ///
    /// # Errors
    ///
    /// Fails if the process has no file descriptor left.
    pub fn of(connection: impl AsFd) -> io::Result<Self> {
        connection.as_fd().try_clone_to_owned().map(Self)
    }

    /// Sends as many bytes as fit into the kernel's buffer now, and returns their number. Returns 0 as well if the
    /// connection is broken; the owner of the connection detects that when it reads.
    #[must_use]
    pub fn send(&self, bytes: &[u8]) -> usize {
        send(&self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).unwrap_or(0)
    }

    /// Closes this handle. The TCP connection is reset once its other handles are closed too, and unsent data is
    /// discarded.
    ///
    /// Without a reset the kernel keeps sending its buffer: a server that recovers minutes later would execute a request
    /// whose caller gave up long ago.
    pub fn reset(self) {
        // If this fails, the connection is closed gracefully.
        let _ = SockRef::from(&self.0).set_linger(Some(Duration::ZERO));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn sent_bytes_arrive_in_order_and_a_full_buffer_does_not_block() {
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
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();
        assert_eq!(received, vec![7; sent]);
    }

    /// Closes a connection, and returns what the other end reads.
    fn closed(close: impl FnOnce(Socket)) -> io::Result<usize> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        close(Socket::of(&ours).unwrap());
        drop(ours);
        theirs.read(&mut [0; 16])
    }

    #[test]
    fn connection_is_reset_or_closed_gracefully() {
        assert_eq!(closed(drop).unwrap(), 0);
        assert_eq!(closed(Socket::reset).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_broken_connection_accepts_nothing_and_raises_no_signal() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = Socket::of(&ours).unwrap();
        drop(theirs);
        assert_eq!(socket.send(b"hello"), 0);
    }
}
