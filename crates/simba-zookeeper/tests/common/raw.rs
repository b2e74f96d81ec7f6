//! A blocking client for tests: one request at a time, on a session of its own.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// The limit for an answer, ample on a busy machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The error code for a node that does not exist.
pub(crate) const NO_NODE: i32 = -101;

/// The bit masks for all rights, and for the rights to read and to create.
pub(crate) const ALL: i32 = 31;
pub(crate) const READ_AND_CREATE: i32 = 5;

pub(crate) struct Raw {
    stream: TcpStream,
}

/// A request under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn int(mut self, value: i32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    fn long(mut self, value: i64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    fn bytes(self, value: &[u8]) -> Self {
        let mut this = self.int(value.len() as i32);
        this.0.extend(value);
        this
    }

    fn flag(mut self, value: bool) -> Self {
        self.0.push(u8::from(value));
        self
    }
}

impl Raw {
    pub(crate) fn connect(address: impl ToSocketAddrs) -> Self {
        Self::attach(address, 0, &[0; 16])
    }

    fn attach(address: impl ToSocketAddrs, session: i64, password: &[u8]) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut this = Self { stream };
        let connect = Message::default().int(0).long(0).int(10_000).long(session).bytes(password).flag(false);
        this.put(&connect);
        let granted = this.get();
        assert_ne!(&granted[4..8], &[0; 4], "the session has expired");
        this
    }

    fn put(&mut self, message: &Message) {
        let framed = Message::default().bytes(&message.0);
        self.stream.write_all(&framed.0).unwrap();
    }

    fn get(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        self.stream.read_exact(&mut body).unwrap();
        body
    }

    /// Sends a request. Returns its error code and the body of the answer.
    fn call(&mut self, kind: i32, body: Message) -> (i32, Vec<u8>) {
        let mut message = Message::default().int(1).int(kind);
        message.0.extend(body.0);
        self.put(&message);
        let answer = self.get();
        (i32::from_be_bytes(answer[12..16].try_into().unwrap()), answer[16..].to_vec())
    }

    /// Creates a node with all rights for every client. Returns the error code.
    pub(crate) fn create(&mut self, path: &str) -> i32 {
        self.create_for(path, ALL, "world", "anyone")
    }

    pub(crate) fn create_for(&mut self, path: &str, rights: i32, scheme: &str, id: &str) -> i32 {
        let body = Message::default().bytes(path.as_bytes()).bytes(&[]).int(1).int(rights);
        self.call(1, body.bytes(scheme.as_bytes()).bytes(id.as_bytes()).int(0)).0
    }

    pub(crate) fn delete(&mut self, path: &str) -> i32 {
        self.call(2, Message::default().bytes(path.as_bytes()).int(-1)).0
    }

    pub(crate) fn children(&mut self, path: &str) -> Vec<String> {
        let (error, body) = self.call(8, Message::default().bytes(path.as_bytes()).flag(false));
        let mut rest = &body[..];
        let int = |rest: &mut &[u8]| {
            let (head, tail) = rest.split_at(4);
            *rest = tail;
            i32::from_be_bytes(head.try_into().unwrap()) as usize
        };
        if error != 0 {
            return Vec::new();
        }
        let count = int(&mut rest);
        (0..count)
            .map(|_| {
                let length = int(&mut rest);
                let (name, tail) = rest.split_at(length);
                rest = tail;
                String::from_utf8(name.to_vec()).unwrap()
            })
            .collect()
    }

    /// Returns the session that an ephemeral node belongs to, or `None` if the node does not exist.
    pub(crate) fn owner(&mut self, path: &str) -> Option<i64> {
        self.stat(path, 44)
    }

    /// Returns the number of the transaction that created a node, or `None` if the node does not exist.
    pub(crate) fn created(&mut self, path: &str) -> Option<i64> {
        self.stat(path, 0)
    }

    /// Returns the number at this position of a node's metadata.
    fn stat(&mut self, path: &str, at: usize) -> Option<i64> {
        let (error, body) = self.call(3, Message::default().bytes(path.as_bytes()).flag(false));
        (error == 0).then(|| i64::from_be_bytes(body[at..at + 8].try_into().unwrap()))
    }

    /// Ends the session.
    pub(crate) fn close(mut self) {
        self.call(-11, Message::default());
    }
}

/// Takes a session over and ends it in one write, since its owner reconnects within milliseconds.
pub(crate) fn end(address: SocketAddr, session: i64) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
    let connect = Message::default().int(0).long(0).int(10_000).long(session).bytes(&password(session));
    let close = Message::default().int(1).int(-11);
    let mut both = Message::default().bytes(&connect.flag(false).0).0;
    both.extend(Message::default().bytes(&close.0).0);
    stream.write_all(&both).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Returns the password of a session. A server generates it with Java's random generator, seeded with the session's
/// number and a constant of the server's source.
fn password(session: i64) -> [u8; 16] {
    const MASK: u64 = (1 << 48) - 1;
    let mut state = (session as u64 ^ 0xB341_5C00 ^ 0x5_DEEC_E66D) & MASK;
    let mut password = [0; 16];
    for four in password.chunks_mut(4) {
        state = (state.wrapping_mul(0x5_DEEC_E66D) + 0xB) & MASK;
        four.copy_from_slice(&((state >> 16) as u32).to_le_bytes());
    }
    password
}

/// Returns the reply of a server to a four-letter command.
pub(crate) fn four_letters(address: SocketAddr, command: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(ANSWER_LIMIT)).unwrap();
    stream.write_all(command.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}
