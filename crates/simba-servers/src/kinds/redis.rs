//! Redis, in memory only.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::process::Command;

use anyhow::Result;

use super::{Kind, Place, expect};
use crate::setup::free_address;

pub(crate) const KIND: Kind = Kind {
    name: "redis",
    programs: &[("redis-server", "redis-server")],
    user: None,
    prepare,
    command,
    url: |place| format!("redis://{}", place.address),
    probe,
};

fn command(place: &Place) -> Result<Command> {
    let mut command = place.program("redis-server")?;
    command.args(["--bind", &place.address.ip().to_string(), "--port", &place.port()]);
    command.arg("--dir").arg(&place.dir);
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
    if place.tls {
        command.args(["--tls-port", fs::read_to_string(place.path(TLS_PORT))?.trim()]);
        command.args(["--tls-ca-cert-file", "ca.pem", "--tls-cert-file", "server.pem"]);
        command.args(["--tls-key-file", "server.key", "--tls-auth-clients", "optional"]);
    }
    Ok(command)
}

/// Where the port for TLS is kept; the server tells it by `CONFIG GET tls-port`.
const TLS_PORT: &str = "tls-port";

fn prepare(place: &Place) -> Result<()> {
    match place.tls {
        true => place.write(TLS_PORT, &free_address()?.port().to_string()),
        false => Ok(()),
    }
}

/// Succeeds when a PING is answered.
pub(super) fn probe(place: &Place) -> io::Result<()> {
    ping(place.address)
}

pub(super) fn ping(address: SocketAddr) -> io::Result<()> {
    expect(address, "PING\r\n", "+PONG\r\n")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// What the probe makes of a server that sends this.
    fn probe_of(answer: &'static [u8]) -> io::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answer).unwrap();
            stream.read_exact(&mut [0; 6]).unwrap();
        });
        let dir = std::env::temp_dir();
        let settings = Vec::new();
        let place =
            Place { dir, disk: None, address, tls: false, zone: None, upstream: None, settings, login: None };
        let outcome = probe(&place);
        server.join().unwrap();
        outcome
    }

    #[test]
    fn a_pong_is_a_server_that_serves() {
        probe_of(b"+PONG\r\n").unwrap();
    }

    #[test]
    fn any_other_answer_is_told() {
        let error = probe_of(b"-LOADING Redis is loading the dataset\r\n").unwrap_err();
        assert!(error.to_string().contains("-LOADIN"), "{error}");
    }
}
