//! TLS as the backends offer it: three ways to check the server, one's own authority, a client certificate.

mod pem;
mod verifier;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use simba_core::{ConnectUrl, Error, ErrorKind, Result};

use verifier::{AnyCertificate, AnyName};

/// How much of the server's certificate is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verify {
    /// That an authority we trust signed it, for the host that we asked for.
    Full,
    /// That an authority we trust signed it, for whatever host. Any of its customers can pose as the server.
    Ca,
    /// Nothing: what is sent is encrypted, but anyone in between can pose as the server.
    Nothing,
}

/// What to ask of an encrypted connection.
///
/// # Examples
///
/// ```
/// use simba_net::{Tls, Verify};
///
/// let tls = Tls::new(Verify::Full).with_server_name("db.internal");
/// assert_eq!(tls.verify(), Verify::Full);
/// tls.client_config()?;
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Tls {
    verify: Verify,
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
    server_name: Option<String>,
}

impl Tls {
    /// Checks this much, against the well-known public authorities.
    pub const fn new(verify: Verify) -> Self {
        Self { verify, ca: None, identity: None, server_name: None }
    }

    /// What the keys `tls`, `tls-ca`, `tls-cert`, `tls-key` and `tls-name` of a URL ask for; nothing without the first,
    /// unless the scheme `always` means TLS.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a value that makes no sense, or a key without the one that it goes with.
    pub fn from_url(url: &ConnectUrl, always: bool) -> Result<Option<Self>> {
        let verify = match url.query("tls") {
            None if !always => {
                let scheme = url.scheme();
                return match url.queries().find(|(key, _)| key.starts_with("tls-")) {
                    None => Ok(None),
                    Some((key, _)) => Err(invalid(format!("`{key}` is for TLS: write {scheme}s://"))),
                };
            }
            None | Some("full") => Verify::Full,
            Some("ca") => Verify::Ca,
            Some("nothing") => Verify::Nothing,
            Some(_) => return Err(invalid("`tls` in the URL is none of `full`, `ca` and `nothing`")),
        };
        let mut tls = Self::new(verify);
        if let Some(ca) = url.query("tls-ca") {
            tls = tls.with_ca(ca);
        }
        if let Some(name) = url.query("tls-name") {
            tls = tls.with_server_name(name);
        }
        match (url.query("tls-cert"), url.query("tls-key")) {
            (Some(certificate), Some(key)) => Ok(Some(tls.with_identity(certificate, key))),
            (None, None) => Ok(Some(tls)),
            _ => Err(invalid("`tls-cert` and `tls-key` go together")),
        }
    }

    /// Trusts the authorities in this PEM file, and no other.
    pub fn with_ca(self, path: impl Into<PathBuf>) -> Self {
        Self { ca: Some(path.into()), ..self }
    }

    /// Shows the server the certificate in this PEM file, with the key in that one.
    pub fn with_identity(self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { identity: Some((certificate.into(), key.into())), ..self }
    }

    /// Expects a certificate for this name instead of the host that is connected to.
    pub fn with_server_name(self, name: impl Into<String>) -> Self {
        Self { server_name: Some(name.into()), ..self }
    }

    /// How much is checked.
    #[must_use]
    pub const fn verify(&self) -> Verify {
        self.verify
    }

    /// The file with the authorities to trust, if not the public ones.
    #[must_use]
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    /// The files with the client's certificate and key.
    #[must_use]
    pub fn identity(&self) -> Option<(&Path, &Path)> {
        self.identity.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()))
    }

    /// The name that the certificate of `host` must be for.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it can be no host's name.
    pub fn server_name(&self, host: &str) -> Result<ServerName<'static>> {
        let name = self.server_name.as_deref().unwrap_or(host);
        ServerName::try_from(name.to_owned()).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("`{name}` can be no server's name in a certificate"))
                .with_source(error)
        })
    }

    /// What rustls needs for a connection of this kind.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] with the file that cannot be read or holds something else.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| config("this build of rustls has no TLS version to offer", error))?;
        let builder = match self.verify {
            Verify::Full => builder.with_root_certificates(self.roots()?),
            Verify::Ca => {
                let verifier = AnyName::new(self.roots()?, provider)
                    .map_err(|error| config("the authorities to trust are of no use", error))?;
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
            }
            Verify::Nothing => {
                builder.dangerous().with_custom_certificate_verifier(any_certificate(provider))
            }
        };
        let config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(pem::certificates(certificate)?, pem::key(key)?)
                .map_err(|error| {
                    config(
                        &format!("`{}` and `{}` do not match", certificate.display(), key.display()),
                        error,
                    )
                })?,
        };
        Ok(Arc::new(config))
    }

    fn roots(&self) -> Result<Arc<RootCertStore>> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(path) => {
                for certificate in pem::certificates(path)? {
                    roots.add(certificate).map_err(|error| {
                        config(&format!("`{}` holds no authority's certificate", path.display()), error)
                    })?;
                }
            }
        }
        Ok(Arc::new(roots))
    }
}

fn any_certificate(provider: Arc<CryptoProvider>) -> Arc<AnyCertificate> {
    Arc::new(AnyCertificate::new(provider))
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn config(message: &str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Config, message.to_owned()).with_source(source)
}

#[cfg(test)]
mod tests;
