//! Handshakes without a network, with generated certificates.

use std::io::{Read as _, Write as _};

use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConnection, ServerConfig, ServerConnection};
use simba_servers::Certificates;
use tempfile::TempDir;

use super::*;

struct Server {
    certificates: Certificates,
    _dir: TempDir,
}

impl Server {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { certificates: Certificates::create(dir.path()).unwrap(), _dir: dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.certificates.path(name)
    }

    /// Returns a configuration that requires a client certificate if `wants_client`.
    fn config(&self, wants_client: bool) -> Arc<ServerConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if wants_client {
            let roots = Tls::new(Verify::Full).with_ca(self.path("ca.pem")).roots().unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let certificate = pem::certificates(&self.path("server.pem")).unwrap();
        Arc::new(builder.with_single_cert(certificate, pem::key(&self.path("server.key")).unwrap()).unwrap())
    }

    /// Returns whether the handshake succeeds and the server receives the client's bytes.
    fn accepts(&self, tls: &Tls, host: &str, wants_client: bool) -> bool {
        let name = tls.server_name(host).unwrap();
        let mut client = ClientConnection::new(tls.client_config().unwrap(), name).unwrap();
        let mut server = ServerConnection::new(self.config(wants_client)).unwrap();
        client.writer().write_all(b"hello").unwrap();
        for _ in 0..10 {
            if !transfer(&mut client, &mut server) || !transfer(&mut server, &mut client) {
                return false;
            }
        }
        let mut received = [0; 5];
        server.reader().read_exact(&mut received).is_ok() && &received == b"hello"
    }
}

/// Moves the pending bytes of one side to the other; false if the receiver rejects them.
fn transfer<A, B, C, D>(from: &mut A, to: &mut B) -> bool
where
    A: std::ops::DerefMut<Target = rustls::ConnectionCommon<C>>,
    B: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    C: rustls::SideData,
    D: rustls::SideData,
{
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).unwrap();
    }
    let mut bytes = &bytes[..];
    while !bytes.is_empty() {
        to.read_tls(&mut bytes).unwrap();
        if to.process_new_packets().is_err() {
            return false;
        }
    }
    true
}

#[test]
fn each_level_of_verification_accepts_exactly_what_it_states() {
    let server = Server::new();
    let (ours, other) = (server.path("ca.pem"), server.path("other-ca.pem"));
    for (verify, ca, host, wanted) in [
        (Verify::Full, Some(&ours), "localhost", true),
        (Verify::Full, Some(&ours), "127.0.0.1", false),
        (Verify::Full, Some(&other), "localhost", false),
        (Verify::Full, None, "localhost", false),
        (Verify::Ca, Some(&ours), "127.0.0.1", true),
        (Verify::Ca, Some(&other), "localhost", false),
        (Verify::Ca, None, "localhost", false),
        (Verify::Nothing, None, "127.0.0.1", true),
        (Verify::Nothing, Some(&other), "localhost", true),
    ] {
        let tls = Tls::new(verify);
        let tls = ca.map_or(tls.clone(), |ca| tls.with_ca(ca));
        assert_eq!(server.accepts(&tls, host, false), wanted, "{tls:?} at {host}");
    }
}

#[test]
fn another_name_can_be_expected() {
    let server = Server::new();
    let tls = Tls::new(Verify::Full).with_ca(server.path("ca.pem")).with_server_name("localhost");
    assert!(server.accepts(&tls, "127.0.0.1", false));
}

#[test]
fn a_client_authenticates_with_its_certificate() {
    let server = Server::new();
    let tls = Tls::new(Verify::Full).with_ca(server.path("ca.pem"));
    assert!(!server.accepts(&tls, "localhost", true));
    let tls = tls.with_identity(server.path("client.pem"), server.path("client.key"));
    assert!(server.accepts(&tls, "localhost", true));
}

#[test]
fn the_error_for_an_invalid_file_names_it_and_does_not_quote_it() {
    let server = Server::new();
    let (pem, key) = (server.path("client.pem"), server.path("client.key"));
    let wrong = Tls::new(Verify::Full);
    for (tls, named) in [
        (wrong.clone().with_ca(server.path("absent.pem")), "absent.pem"),
        (wrong.clone().with_ca(&key), "client.key"),
        (wrong.clone().with_identity(&pem, &pem), "client.pem"),
        (wrong.with_identity(server.path("server.pem"), &key), "do not match"),
    ] {
        let error = tls.client_config().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(named) && !error.to_string().contains("BEGIN"), "{error}");
    }
}

#[test]
fn an_invalid_server_name_is_rejected() {
    assert_eq!(Tls::new(Verify::Full).server_name("no host").unwrap_err().kind(), ErrorKind::Invalid);
}
