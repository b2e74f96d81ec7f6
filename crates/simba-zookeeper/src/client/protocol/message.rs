//! The requests and replies that a latch needs.

use super::jute::{Malformed, Reader, Writer};
use super::names::Names;

/// The numbers of messages that do not belong to a numbered request.
pub(crate) const PING: i32 = -2;
pub(crate) const AUTH: i32 = -4;
pub(crate) const EVENT: i32 = -1;

/// The kinds of requests, as the server numbers them.
mod kind {
    pub(crate) const DELETE: i32 = 2;
    pub(crate) const EXISTS: i32 = 3;
    pub(crate) const DATA: i32 = 4;
    pub(crate) const CHILDREN: i32 = 8;
    pub(crate) const SYNC: i32 = 9;
    pub(crate) const PING: i32 = 11;
    pub(crate) const CHECK: i32 = 13;
    pub(crate) const MULTI: i32 = 14;
    pub(crate) const CREATE: i32 = 15;
    pub(crate) const CONTAINER: i32 = 19;
    pub(crate) const AUTH: i32 = 100;
    pub(crate) const SASL: i32 = 102;
    pub(crate) const CLOSE: i32 = -11;
    pub(crate) const ERROR: i32 = -1;
}

/// The kind of a node to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Deleted with the session, and numbered in the order of creation.
    EphemeralSequential,
    /// Deleted by the server some time after its last child was deleted.
    Container,
    /// For servers that do not support containers.
    Persistent,
}

/// The access control list of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Access {
    /// All rights for every client, as on nodes of JVM contenders.
    #[default]
    Open,
    /// All rights for clients with the credentials of this session only.
    Creator,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Create {
        path: String,
        data: Vec<u8>,
        mode: Mode,
        access: Access,
    },
    Delete {
        path: String,
    },
    Exists {
        path: String,
        watch: bool,
    },
    Data {
        path: String,
        watch: bool,
    },
    Children {
        path: String,
        watch: bool,
    },
    Sync {
        path: String,
    },
    /// Checks by a quorum that each of these nodes exists. Changes nothing.
    Check {
        paths: Vec<String>,
    },
    /// Ends the session.
    Close,
}

impl Request {
    pub(crate) fn write(&self, xid: i32, writer: &mut Writer) {
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
                Self::Check { paths } => checks(w, paths),
                Self::Close => {
                    w.int(kind::CLOSE);
                }
            }
        });
    }

    pub(crate) fn read(&self, body: &mut Reader<'_>) -> Result<Reply, Malformed> {
        Ok(match self {
            Self::Create { .. } => Reply::Created { path: body.text()?.to_owned(), stat: Stat::read(body)? },
            Self::Delete { .. } | Self::Sync { .. } | Self::Exists { .. } | Self::Close => Reply::Done,
            Self::Check { paths } => Reply::Checked(checked(body, paths.len())?),
            Self::Data { .. } => Reply::Data { data: body.buffer()?.to_vec(), stat: Stat::read(body)? },
            Self::Children { .. } => Reply::Children(body.texts()?),
        })
    }

    /// Returns whether the request needs a quorum and a live session.
    pub(crate) const fn is_write(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Delete { .. })
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

/// The reply to a request that succeeded.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Created {
        path: String,
        stat: Stat,
    },
    Done,
    Data {
        data: Vec<u8>,
        stat: Stat,
    },
    Children(Names),
    /// The error of each check, 0 for success.
    Checked(Vec<i32>),
}

/// The used fields of a node's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The transaction that created the node.
    pub(crate) czxid: i64,
    /// The session that an ephemeral node belongs to, or 0.
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

/// The header of every answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) xid: i32,
    pub(crate) zxid: i64,
    pub(crate) error: i32,
}

impl Header {
    pub(crate) fn read(frame: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { xid: frame.int()?, zxid: frame.long()?, error: frame.int()? })
    }
}

/// Returns the path of the node whose watch fired.
pub(crate) fn event<'a>(body: &mut Reader<'a>) -> Result<&'a str, Malformed> {
    body.int()?;
    body.int()?;
    body.text()
}

// ===== many checks in one request =====

fn checks(w: &mut Writer, paths: &[String]) {
    const ANY_VERSION: i32 = -1;
    w.int(kind::MULTI);
    for path in paths {
        w.int(kind::CHECK).bool(false).int(-1).text(path).int(ANY_VERSION);
    }
    w.int(-1).bool(true).int(-1);
}

/// Returns the error of each check, 0 for success. Their number has to be `count`: a check without an answer would be
/// repeated for ever.
fn checked(body: &mut Reader<'_>, count: usize) -> Result<Vec<i32>, Malformed> {
    let mut errors = Vec::new();
    loop {
        let (kind, done, _) = (body.int()?, body.bool()?, body.int()?);
        match kind {
            _ if done && errors.len() < count => {
                return Err(Malformed("fewer checks are answered than were sent"));
            }
            _ if done => return Ok(errors),
            kind::ERROR => errors.push(body.int()?),
            kind::CHECK => errors.push(0),
            _ => return Err(Malformed("a check has an answer of another kind")),
        }
        if errors.len() > count {
            return Err(Malformed("more checks are answered than were sent"));
        }
    }
}

// ===== the session itself =====

/// A session that a server grants.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    /// The timeout in milliseconds; 0 if the session has expired.
    pub(crate) timeout: i32,
    pub(crate) session: i64,
    pub(crate) password: Vec<u8>,
}

pub(crate) fn connect(zxid: i64, timeout: i32, session: i64, password: &[u8], writer: &mut Writer) {
    writer.frame(|w| {
        w.int(0).long(zxid).int(timeout).long(session).buffer(password).bool(false);
    });
}

pub(crate) fn connected(frame: &[u8]) -> Result<Granted, Malformed> {
    let mut body = Reader::new(frame);
    if body.int()? != 0 {
        return Err(Malformed("the server speaks another version of the protocol"));
    }
    let (timeout, session) = (body.int()?, body.long()?);
    Ok(Granted { timeout, session, password: body.buffer()?.to_vec() })
}

pub(crate) fn ping(writer: &mut Writer) {
    writer.frame(|w| {
        w.int(PING).int(kind::PING);
    });
}

pub(crate) fn authenticate(scheme: &str, credentials: &[u8], writer: &mut Writer) {
    writer.frame(|w| {
        w.int(AUTH).int(kind::AUTH).int(0).text(scheme).buffer(credentials);
    });
}

pub(crate) fn sasl(xid: i32, token: &[u8], writer: &mut Writer) {
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
    fn a_create_request_has_its_kind_and_access_list() {
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
    fn the_failed_check_is_distinguished_from_those_after_it() {
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
        fn no_answer_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
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
