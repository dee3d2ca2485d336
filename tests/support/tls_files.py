"""Certificate authorities for tests: keys, certificates and revocation lists, all good and in every way bad."""

import datetime
import functools
import json

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_PASSWORD, CLIENT_PASSWORD = "server secret", "client secret"
PASSWORDS = {"MSRUN_TLS_SERVER_PASSWORD": SERVER_PASSWORD, "MSRUN_TLS_CLIENT_PASSWORD": CLIENT_PASSWORD}
DAY = datetime.timedelta(days=1)
USAGES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


def now():
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def new_key():
    return ec.generate_private_key(ec.SECP256R1())


@functools.cache
def small_rsa_key():
    """Too small for security level 3; slow to make, so there is one."""
    return rsa.generate_private_key(65537, 2048)


class Authority:
    """A CA."""

    def __init__(self, name="test CA", days=1000, key=None, is_ca=True):
        self.key = key or new_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self.key.public_key(), days, -1)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.pem = self.certificate.public_bytes(Encoding.PEM)

    def _builder(self, name, public, days, begin_days):
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() + DAY * begin_days)
            .not_valid_after(now() + DAY * days)
        )

    def issue(self, key, *, name="host", side="", days=365, begin_days=-2, ip=""):
        """Sign a certificate. `side`: which one it may be used for; both when empty."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), days, begin_days)
        if side:
            builder = builder.add_extension(x509.ExtendedKeyUsage([USAGES[side]]), critical=False)
        if ip:
            import ipaddress

            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ip))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def revoke(self, certificates=(), begin_days=-2, days=30):
        """Return a revocation list as PEM."""
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now() + DAY * begin_days).next_update(now() + DAY * days)
        for certificate in certificates:
            entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
            builder = builder.add_revoked_certificate(entry.revocation_date(now() - DAY).build())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def as_pem(key, certificate, password=""):
    """Return key and certificate in one PEM text."""
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption) if key else b""
    return text + (certificate.public_bytes(Encoding.PEM) if certificate else b"")


class TlsFolder:
    """A folder with what --tls_config needs, as one CA gives it to a cluster."""

    def __init__(self, folder, authority):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority = authority
        self.keys = {side: new_key() for side in ("server", "client")}
        self.certificates = {side: authority.issue(self.keys[side], name=side, side=side) for side in self.keys}
        self.write("ca.crt", authority.pem)
        for side, password in (("server", SERVER_PASSWORD), ("client", CLIENT_PASSWORD)):
            self.write(f"{side}.pem", as_pem(self.keys[side], self.certificates[side], password))

    def write(self, name, data, mode=0o600):
        """Write a file of the folder."""
        path = self.folder / name
        path.write_bytes(data)
        path.chmod(mode)
        return path

    def config(self, name="tls.json", **changes):
        """Write a file for --tls_config, in the words of MindSpore; None takes a key out."""
        values = {
            "server_cert_path": "server.pem",
            "client_cert_path": "client.pem",
            "ca_cert_path": "ca.crt",
            "crl_path": "",
            "cert_expire_warning_time_in_day": 90,
        }
        left = {key: value for key, value in {**values, **changes}.items() if value is not None}
        return self.write(name, json.dumps(left).encode())
