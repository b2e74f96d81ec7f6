//! The requests and replies that a latch needs.

use super::jute::{Malformed, Reader, Writer};
use super::names::Names;

/// Numbers that requests without a turn of their own have.
pub(super) const PING: i32 = -2;
pub(super) const AUTH: i32 = -4;
pub(super) const EVENT: i32 = -1;

/// The kinds of requests, as the server numbers them.
mod kind {
    pub(super) const DELETE: i32 = 2;
    pub(super) const EXISTS: i32 = 3;
    pub(super) const DATA: i32 = 4;
    pub(super) const CHILDREN: i32 = 8;
    pub(super) const SYNC: i32 = 9;
    pub(super) const PING: i32 = 11;
    pub(super) const CHECK: i32 = 13;
    pub(super) const MULTI: i32 = 14;
    pub(super) const CREATE: i32 = 15;
    pub(super) const CONTAINER: i32 = 19;
    pub(super) const AUTH: i32 = 100;
    pub(super) const SASL: i32 = 102;
    pub(super) const CLOSE: i32 = -11;
    pub(super) const ERROR: i32 = -1;
}

/// What kind of node to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Gone with the session, and numbered in the order of creation.
    EphemeralSequential,
    /// Swept by the server some time after its last child is gone.
    Container,
    /// For servers that know no containers.
    Persistent,
}

/// Who may do what with a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everybody everything, as the JVM peers do.
    #[default]
    Open,
    /// Whoever has the credentials of this session.
    Creator,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Create { path: String, data: Vec<u8>, mode: Mode, access: Access },
    Delete { path: String },
    Exists { path: String, watch: bool },
    Data { path: String, watch: bool },
    Children { path: String, watch: bool },
    Sync { path: String },
}

impl Request {
    pub(super) fn write(&self, xid: i32, writer: &mut Writer) {
        writer.frame(|w| {
            w.int(xid);
            match self {
                Self::Create { path, data, mode, access } => create(w, path, data, *mode, *access),
                Self::Delete { path } => {
                    w.int(kind::DELETE).text(path).int(-1);
                }
                Self::Exists { path, watch } => {
                    w.int(kind::EXISTS).text(path).bool(*watch);
                }
                Self::Data { path, watch } => {
                    w.int(kind::DATA).text(path).bool(*watch);
                }
                Self::Children { path, watch } => {
                    w.int(kind::CHILDREN).text(path).bool(*watch);
                }
                Self::Sync { path } => {
                    w.int(kind::SYNC).text(path);
                }
            }
        });
    }

    pub(super) fn read(&self, body: &mut Reader<'_>) -> Result<Reply, Malformed> {
        Ok(match self {
            Self::Create { .. } => Reply::Created { path: body.text()?.to_owned(), stat: Stat::read(body)? },
            Self::Delete { .. } | Self::Sync { .. } | Self::Exists { .. } => Reply::Done,
            Self::Data { .. } => Reply::Data { data: body.buffer()?.to_vec(), stat: Stat::read(body)? },
            Self::Children { .. } => Reply::Children(body.texts()?),
        })
    }

    /// Whether it takes a quorum to carry it out, and a session that lives.
    pub(super) const fn is_write(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Delete { .. })
    }

    /// What is watched once the request is answered.
    pub(super) fn watched(&self) -> Option<&str> {
        match self {
            Self::Exists { path, watch: true }
            | Self::Data { path, watch: true }
            | Self::Children { path, watch: true } => Some(path),
            _ => None,
        }
    }
}

fn create(w: &mut Writer, path: &str, data: &[u8], mode: Mode, access: Access) {
    const ALL: i32 = 31;
    let (kind, flags) = match mode {
        Mode::EphemeralSequential => (kind::CREATE, 3),
        Mode::Container => (kind::CONTAINER, 4),
        Mode::Persistent => (kind::CREATE, 0),
    };
    let (scheme, id) = match access {
        Access::Open => ("world", "anyone"),
        Access::Creator => ("auth", ""),
    };
    w.int(kind).text(path).buffer(data).int(1).int(ALL).text(scheme).text(id).int(flags);
}

/// The answer to a request that was carried out.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Created { path: String, stat: Stat },
    Done,
    Data { data: Vec<u8>, stat: Stat },
    Children(Names),
}

/// What a server knows of a node, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The transaction that made it.
    pub(crate) czxid: i64,
    /// The session that it ends with; 0 for none.
    pub(crate) owner: i64,
}

impl Stat {
    fn read(body: &mut Reader<'_>) -> Result<Self, Malformed> {
        let czxid = body.long()?;
        for _ in 0..3 {
            body.long()?;
        }
        for _ in 0..3 {
            body.int()?;
        }
        let owner = body.long()?;
        body.int()?;
        body.int()?;
        body.long()?;
        Ok(Self { czxid, owner })
    }
}

/// What precedes every answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) xid: i32,
    pub(super) zxid: i64,
    pub(super) error: i32,
}

impl Header {
    pub(super) fn read(frame: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { xid: frame.int()?, zxid: frame.long()?, error: frame.int()? })
    }
}

/// The node that a watch fired for.
pub(super) fn event<'a>(body: &mut Reader<'a>) -> Result<&'a str, Malformed> {
    body.int()?;
    body.int()?;
    body.text()
}

// ===== many checks in one request =====

/// A request that changes nothing and needs a quorum: each of these nodes exists.
pub(super) fn checks<'a>(xid: i32, paths: impl Iterator<Item = &'a str>, writer: &mut Writer) {
    const ANY_VERSION: i32 = -1;
    writer.frame(|w| {
        w.int(xid).int(kind::MULTI);
        for path in paths {
            w.int(kind::CHECK).bool(false).int(-1).text(path).int(ANY_VERSION);
        }
        w.int(-1).bool(true).int(-1);
    });
}

/// The error of each check, 0 for none: as many as there are checks, or those without one would be asked for ever.
pub(super) fn checked(body: &mut Reader<'_>, count: usize) -> Result<Vec<i32>, Malformed> {
    let mut errors = Vec::new();
    loop {
        let (kind, done, _) = (body.int()?, body.bool()?, body.int()?);
        match kind {
            _ if done && errors.len() < count => {
                return Err(Malformed("fewer checks are answered than were asked for"));
            }
            _ if done => return Ok(errors),
            kind::ERROR => errors.push(body.int()?),
            kind::CHECK => errors.push(0),
            _ => return Err(Malformed("a check is answered by something else")),
        }
        if errors.len() > count {
            return Err(Malformed("more checks are answered than were asked for"));
        }
    }
}

// ===== the session itself =====

/// What a server grants to a session.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    /// In milliseconds; nothing if the session has expired.
    pub(super) timeout: i32,
    pub(super) session: i64,
    pub(super) password: Vec<u8>,
}

pub(super) fn connect(zxid: i64, timeout: i32, session: i64, password: &[u8], writer: &mut Writer) {
    writer.frame(|w| {
        w.int(0).long(zxid).int(timeout).long(session).buffer(password).bool(false);
    });
}

pub(super) fn connected(frame: &[u8]) -> Result<Granted, Malformed> {
    let mut body = Reader::new(frame);
    if body.int()? != 0 {
        return Err(Malformed("the server speaks another version of the protocol"));
    }
    let (timeout, session) = (body.int()?, body.long()?);
    Ok(Granted { timeout, session, password: body.buffer()?.to_vec() })
}

pub(super) fn ping(writer: &mut Writer) {
    writer.frame(|w| {
        w.int(PING).int(kind::PING);
    });
}

pub(super) fn close(xid: i32, writer: &mut Writer) {
    writer.frame(|w| {
        w.int(xid).int(kind::CLOSE);
    });
}

pub(super) fn authenticate(scheme: &str, credentials: &[u8], writer: &mut Writer) {
    writer.frame(|w| {
        w.int(AUTH).int(kind::AUTH).int(0).text(scheme).buffer(credentials);
    });
}

pub(super) fn sasl(xid: i32, token: &[u8], writer: &mut Writer) {
    writer.frame(|w| {
        w.int(xid).int(kind::SASL).buffer(token);
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(writer: &Writer) -> Reader<'_> {
        Reader::new(&writer.bytes()[4..])
    }

    #[test]
    fn a_create_has_its_kind_and_its_rights() {
        let mut writer = Writer::default();
        let request = Request::Create {
            path: "/simba/m/_c_x-latch-".into(),
            data: b"me".to_vec(),
            mode: Mode::EphemeralSequential,
            access: Access::Open,
        };
        request.write(5, &mut writer);
        let mut read = body(&writer);
        assert_eq!((read.int(), read.int()), (Ok(5), Ok(15)));
        assert_eq!((read.text(), read.buffer()), (Ok("/simba/m/_c_x-latch-"), Ok(&b"me"[..])));
        assert_eq!((read.int(), read.int()), (Ok(1), Ok(31)));
        assert_eq!((read.text(), read.text(), read.int()), (Ok("world"), Ok("anyone"), Ok(3)));
    }

    #[test]
    fn the_check_that_failed_is_told_from_those_after_it() {
        let mut writer = Writer::default();
        writer.int(13).bool(false).int(0);
        writer.int(-1).bool(false).int(-101).int(-101);
        writer.int(-1).bool(false).int(-2).int(-2);
        writer.int(-1).bool(true).int(-1);
        assert_eq!(checked(&mut Reader::new(writer.bytes()), 3).unwrap(), [0, -101, -2]);
        assert!(checked(&mut Reader::new(writer.bytes()), 2).is_err(), "an answer too many");
        assert!(checked(&mut Reader::new(writer.bytes()), 4).is_err(), "an answer too few");
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let path = String::from("/a");
            let requests = [
                Request::Data { path: path.clone(), watch: true },
                Request::Children { path: path.clone(), watch: true },
                Request::Exists { path: path.clone(), watch: false },
                Request::Sync { path: path.clone() },
                Request::Create {
                    path, data: Vec::new(), mode: Mode::Container, access: Access::Creator,
                },
            ];
            for request in &requests {
                let _ = request.read(&mut Reader::new(&bytes));
            }
            let _ = (Header::read(&mut Reader::new(&bytes)).is_ok(), connected(&bytes).is_ok());
            let _ = (event(&mut Reader::new(&bytes)).is_ok(), checked(&mut Reader::new(&bytes), 3).is_ok());
        }
    }
}
